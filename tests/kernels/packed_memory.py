"""Random packed pages of several sequences, with what they hold kept aside in plain form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels.compress import Entries, EntryPlanes, write_entries
from cedar.kernels.fp4 import pack_fp4_e4m3, pack_fp4_e8m0, unpack_fp4_e4m3, unpack_fp4_e8m0
from cedar.kernels.paging import Plane


class PackedMemory(NamedTuple):
    pages: torch.Tensor
    planes: EntryPlanes
    table: torch.Tensor
    main: list[torch.Tensor]  # float64 [entries, D] of every sequence, as read back
    index: list[torch.Tensor]  # float64 [entries, Di]


def packed_memory(lengths: list[int], head_dim: int, index_dim: int, rows: int, seed: int) -> PackedMemory:
    """Sequences of `lengths` entries in permuted pages of `rows`; other bytes are 0xFF, read as NaN."""
    g = torch.Generator().manual_seed(seed)
    planes, offset = [], 16
    for row_bytes in (head_dim // 2, head_dim // 16, index_dim // 2, index_dim // 32):
        planes.append(Plane(offset, row_bytes, rows))
        offset += -(-row_bytes * rows // 16) * 16 + 16
    needed = [-(-n // rows) for n in lengths]
    total = sum(needed) + 2
    pages = torch.full((total, offset), 0xFF, dtype=torch.uint8)
    table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    free = torch.randperm(total, generator=g).to(torch.int32)
    main, index = [], []
    for s, n in enumerate(lengths):
        table[s, : needed[s]], free = free[: needed[s]], free[needed[s] :]
        values = torch.randn(n, head_dim, generator=g).bfloat16()
        keys = torch.randn(n, index_dim, generator=g).bfloat16()
        if n > 4:
            keys[n // 2 :: 3] = keys[0]  # equal keys, so equal scores
        entries = Entries(*pack_fp4_e4m3(values), *pack_fp4_e8m0(keys))
        seq = torch.full((n,), s, dtype=torch.int32)
        write_entries(pages, EntryPlanes(*planes), table, seq, torch.arange(n), entries)
        main.append(unpack_fp4_e4m3(*entries[:2]).double())
        index.append(unpack_fp4_e8m0(*entries[2:]).double())
    return PackedMemory(pages, EntryPlanes(*planes), table, main, index)
