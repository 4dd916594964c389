"""A prompt as it arrives at a stage, checked: what passes here hurts neither the network nor a neighbour."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cedar.actors.errors import InvalidRequest
from cedar.kvstore.keys import CONTENT_HASH_BYTES, KEY_BYTES, chain_keys, split_keys
from cedar.model.spans import ImageSpan
from cedar.v1 import common_pb2

if TYPE_CHECKING:
    from cedar.model.config import ModelConfig


@dataclass(frozen=True)
class WirePrompt:
    """Token ids, image spans, and the chain of page keys they have.

    ``prompt_tokens``: tokens of the prompt itself; those after it were generated before.
    """

    ids: list[int]
    images: tuple[ImageSpan, ...]
    root: bytes
    keys: list[bytes]
    prompt_tokens: int

    @property
    def generated(self) -> int:
        """Tokens that were generated before this request was submitted (again)."""
        return len(self.ids) - self.prompt_tokens

    @classmethod
    def parse(
        cls,
        config: ModelConfig,
        page_tokens: int,
        *,
        token_ids: bytes,
        images: Iterable[common_pb2.ImageSpan],
        root_key: bytes,
        page_keys: bytes,
        prompt_tokens: int,
    ) -> WirePrompt:
        """From the fields of a request. InvalidRequest names the field, its value and the limit."""
        ids = unpack_ids(token_ids)
        _check_ids(ids, config)
        if prompt_tokens > len(ids):
            raise InvalidRequest("prompt_tokens", prompt_tokens, f"at most the {len(ids)} token ids")
        if len(root_key) != KEY_BYTES:
            raise InvalidRequest("root_key", f"{len(root_key)} bytes", f"must be {KEY_BYTES} bytes")
        prompt = prompt_tokens or len(ids)
        spans = _spans(images, prompt)
        keys = split_keys(page_keys, limit=len(ids) // page_tokens)
        if keys != chain_keys(root_key, ids, spans, page_tokens):
            what = f"{len(keys)} keys"
            raise InvalidRequest("page_keys", what, "the chain of root_key over all full pages of token_ids")
        return cls(ids, spans, root_key, keys, prompt)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, as they travel."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(token_ids: bytes) -> list[int]:
    """The ids of a ``token_ids`` field. InvalidRequest when it is not whole."""
    if len(token_ids) % 4:
        raise InvalidRequest("token_ids", f"{len(token_ids)} bytes", "must be a multiple of 4 bytes")
    packed = array("I")
    packed.frombytes(token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    if not ids:
        raise InvalidRequest("token_ids", [], "at least one token")
    if len(ids) >= config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise InvalidRequest("token_ids", f"{len(ids)} tokens", f"below the context of {limit} tokens")
    if max(ids) >= config.vocab_size:
        raise InvalidRequest("token_ids", max(ids), f"below the vocabulary's size, {config.vocab_size}")


def _spans(images: Iterable[common_pb2.ImageSpan], prompt: int) -> tuple[ImageSpan, ...]:
    spans = []
    free = 0
    for number, image in enumerate(images):
        field = f"images[{number}]"
        where = f"{image.start}+{image.length}"
        if image.length != image.rows * (image.columns + 1) + 2 or image.length == 0:
            grid = f"{image.rows}x{image.columns}"
            raise InvalidRequest(f"{field}.length", image.length, f"rows x (columns + 1) + 2 of grid {grid}")
        if image.start < free:
            raise InvalidRequest(f"{field}.start", where, f"at or after {free}, the end of the image before")
        if image.start + image.length > prompt:
            raise InvalidRequest(f"{field}.start", where, f"inside the prompt of {prompt} tokens")
        if len(image.content_hash) != CONTENT_HASH_BYTES:
            got = f"{len(image.content_hash)} bytes"
            raise InvalidRequest(f"{field}.content_hash", got, f"must be {CONTENT_HASH_BYTES} bytes")
        spans.append(ImageSpan(image.start, image.length, image.rows, image.columns, image.content_hash))
        free = image.start + image.length
    return tuple(spans)
