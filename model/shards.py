"""safetensors files seen from outside: headers that are checked before a byte of a tensor is read.

A shard is `u64 header length | JSON header | data`. The header must describe the file exactly: tensors tile
the data section without holes or overlaps, sizes follow from dtype and shape, and the file ends where the
last tensor ends. So a truncated upload or an edited header is refused by name, not read as weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cedar.model.errors import CheckpointError
from cedar.model.storage import Storage

MAX_HEADER_BYTES: Final = 100_000_000
STORED_DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: bytes [begin, end) of file `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """One shard's file size, the raw JSON of its header, and its tensors in file order."""

    shard: str
    file_bytes: int
    raw: bytes
    tensors: tuple[StoredTensor, ...]


def read_header(storage: Storage, shard: str) -> ShardHeader:
    """Read and check the header of `shard`.

    Raises CheckpointError naming the shard and what contradicts what.
    """
    file_bytes = storage.size(shard)
    if file_bytes < 8:
        raise CheckpointError(
            shard, f"{file_bytes} bytes", "at least 8 bytes: not a safetensors file, or truncated"
        )
    length = int.from_bytes(storage.read(shard, 0, 8), "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        limit = min(MAX_HEADER_BYTES, file_bytes - 8)
        raise CheckpointError(
            f"{shard} header length", length, f"at most {limit}: a truncated file or a lying header"
        )
    raw = storage.read(shard, 8, 8 + length)
    tensors = _parse(shard, raw, 8 + length)
    _check_tiling(shard, tensors, 8 + length, file_bytes)
    return ShardHeader(shard=shard, file_bytes=file_bytes, raw=raw, tensors=tensors)


def _parse(shard: str, raw: bytes, data_start: int) -> tuple[StoredTensor, ...]:
    try:
        entries = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shard} header", str(error), "valid JSON with unique names") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{shard} header", type(entries).__name__, "a JSON object")
    entries.pop("__metadata__", None)
    tensors = [_stored_tensor(shard, name, entry, data_start) for name, entry in entries.items()]
    return tuple(sorted(tensors, key=lambda t: (t.begin, t.end)))


def _stored_tensor(shard: str, name: str, entry: Any, data_start: int) -> StoredTensor:
    where = f"{shard} header of {name}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(where, entry, "an object with dtype, shape and two data_offsets") from None
    if dtype not in STORED_DTYPE_BYTES:
        raise CheckpointError(f"{where} dtype", dtype, f"one of {sorted(STORED_DTYPE_BYTES)}")
    if not all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
        for value in (*shape, begin, end)
    ):
        raise CheckpointError(where, entry, "made of integers of at least 0")
    expected = math.prod(shape) * STORED_DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{where} data_offsets", [begin, end], f"{expected} bytes apart for {dtype} {list(shape)}"
        )
    return StoredTensor(name, dtype, shape, shard, data_start + begin, data_start + end)


def _check_tiling(shard: str, tensors: tuple[StoredTensor, ...], data_start: int, file_bytes: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.begin != position:
            what = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{shard} start of {tensor.name}", tensor.begin, f"{position}: it {what}")
        position = tensor.end
    if position != file_bytes:
        what = "truncated" if position > file_bytes else "bytes after the last tensor"
        raise CheckpointError(f"{shard} size", file_bytes, f"{position} bytes as its header says: {what}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"name given twice: {next(name for name in names if names.count(name) > 1)}")
    return result
