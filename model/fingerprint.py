"""The model's identity: 32 bytes over weights, config, tokenizer and page format (design §4).

Workers of different fingerprints refuse each other, and pages of different fingerprints never meet. It must
be the same in every stage, so it covers the whole checkpoint and not what a stage loads, and it must be
cheap, so a large shard is sampled: its header, its size, and a block of every tensor outside the routed
experts and of every 16th routed expert tensor. A shard of up to 64 MiB is hashed whole.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from cedar.kvstore.layout import PageLayout
from cedar.model.checkpoint import TOKENIZER_NAME, Checkpoint
from cedar.model.shards import ShardHeader

ARITHMETIC_VERSION: Final = 1  # raise it when the same weights begin to give other bits
_WHOLE_BYTES: Final = 1 << 26
_BLOCK_BYTES: Final = 4096
_EXPERT_STRIDE: Final = 16


def fingerprint(checkpoint: Checkpoint, layout: PageLayout) -> bytes:
    """SHA-256 over everything that decides a page's bytes.

    Reads every shard's header and a few blocks of data.
    """
    digest = hashlib.sha256(b"cedar-model")
    _add(digest, ARITHMETIC_VERSION.to_bytes(4, "little"))
    _add(digest, layout.format_id)
    _add(digest, json.dumps(json.loads(checkpoint.config_json), sort_keys=True).encode())
    if checkpoint.config.engram is not None:
        _add(digest, checkpoint.storage.read_all(TOKENIZER_NAME))
    for shard in checkpoint.shards:
        header = checkpoint.header(shard)
        _add(digest, shard.encode())
        _add(digest, header.file_bytes.to_bytes(8, "little"))
        _add(digest, header.raw)
        ranges = [(shard, begin, end) for begin, end in _sampled_ranges(header)]
        for block in checkpoint.storage.read_blocks(ranges):
            _add(digest, block)
    return digest.digest()


def _sampled_ranges(header: ShardHeader) -> list[tuple[int, int]]:
    if header.file_bytes <= _WHOLE_BYTES:
        return [(8 + len(header.raw), header.file_bytes)]
    ranges = []
    experts = 0
    for tensor in header.tensors:
        if ".experts." in tensor.name:
            experts += 1
            if experts % _EXPERT_STRIDE:
                continue
        middle = (tensor.begin + tensor.end) // 2
        begin = max(tensor.begin, middle - _BLOCK_BYTES // 2)
        ranges.append((begin, min(tensor.end, begin + _BLOCK_BYTES)))
    return ranges


def _add(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
