"""Text to token ids and back, from the checkpoint's `tokenizer.json` (a byte-level BPE).

Two kinds of text exist and never mix: plain text, in which the spelling of a control token (`<think>`, the
image token, ...) is only characters, and `Control`, which is one control token. Whoever holds a user's words
holds plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from cedar.model.prompt_errors import TokenizerError
from cedar.model.storage import Storage

TOKENIZER_FILE: Final = "tokenizer.json"


@dataclass(frozen=True)
class Control:
    """One control token by its spelling, as opposed to plain text that happens to look like it."""

    token: str


Segment = str | Control


class Tokenizer:
    """The checkpoint's tokenizer: immutable, safe to share between threads.

    Every entry of `added_tokens` counts as a control token, whatever its `special` flag: published files
    leave the flag off some of the tokens that steer the model.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend: Final = backend
        self._control: Final = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        self._control_ids: Final = frozenset(self._control.values())
        self._bytes: Final = _token_bytes(backend)

    @classmethod
    def load(cls, storage: Storage) -> Tokenizer:
        """Reads a checkpoint folder's `tokenizer.json`. Raises `CheckpointError` if missing or damaged."""
        return cls.from_json(storage.read_all(TOKENIZER_FILE))

    @classmethod
    def from_json(cls, data: bytes | str, *, source: str = TOKENIZER_FILE) -> Tokenizer:
        """Reads the text of a `tokenizer.json`; `source` names it in errors. Raises `TokenizerError`."""
        try:
            document = json.loads(data)
        except ValueError as error:
            raise TokenizerError(source, f"<{error}>", "valid JSON") from None
        if not isinstance(document, dict):
            raise TokenizerError(source, type(document).__name__, "a JSON object")
        if "ByteLevel" not in _kinds(document.get("decoder")):
            raise TokenizerError(f"{source} decoder", document.get("decoder"), "of type ByteLevel")
        document["truncation"] = document["padding"] = None  # a prompt stays as long as it is
        try:
            for added in document.get("added_tokens") or ():
                added["special"] = True
            backend = tokenizers.Tokenizer.from_str(json.dumps(document))
        except Exception as error:  # the library raises bare Exception for a malformed document
            raise TokenizerError(
                source, f"<{error}>", "a tokenizer that the tokenizers library reads"
            ) from None
        backend.encode_special_tokens = True  # a spelled control token is text
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """One above the largest id that has a token."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without a begin token. No id is a control token's; a lone surrogate becomes
        `?`.
        """
        text = text.encode("utf-8", "replace").decode()
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise TokenizerError("model.vocab", text, "free of merges that spell a control token")
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a sequence of plain text and control tokens; neighbouring texts are joined before they are
        encoded.
        """
        ids: list[int] = []
        pending: list[str] = []
        for segment in segments:
            if isinstance(segment, str):
                pending.append(segment)
                continue
            ids += self.encode("".join(pending))
            pending.clear()
            ids.append(self.control_id(segment.token))
        ids += self.encode("".join(pending))
        return ids

    def control_id(self, token: str) -> int:
        """The id of a control token. Raises `TokenizerError` when the checkpoint has none so spelled."""
        try:
            return self._control[token]
        except KeyError:
            raise TokenizerError("added_tokens", sorted(self._control), f"a list with {token!r}") from None

    @property
    def control_tokens(self) -> dict[str, int]:
        """Spelling to id of every control token."""
        return dict(self._control)

    def control_token(self, token_id: int) -> Control:
        """The control token with this id. Raises `TokenizerError` when the id is not a control token's."""
        if token_id not in self._control_ids:
            raise TokenizerError("added_tokens", sorted(self._control_ids), f"a list with id {token_id}")
        return Control(next(token for token, i in self._control.items() if i == token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token adds to the text, perhaps half a character; empty for an id without a
        token.
        """
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, ids: Sequence[int], *, control: bool = True) -> str:
        """The text of ids, undecodable bytes as U+FFFD; `control=False` leaves control tokens out."""
        shown = ids if control else (i for i in ids if i not in self._control_ids)
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id. A token with a character outside the byte alphabet is its own spelling."""
    alphabet = _byte_alphabet()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        try:
            table[token_id] = bytes(alphabet[c] for c in token)
        except KeyError:
            table[token_id] = token.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself where visible, else from U+0100
    upwards.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder entry and of its parts when it is a sequence."""
    if not isinstance(decoder, dict):
        return set()
    parts = decoder.get("decoders") if isinstance(decoder.get("decoders"), list) else []
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in parts or ()))
