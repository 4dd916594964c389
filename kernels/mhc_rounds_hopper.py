# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the trades of `mhc_many_hopper` share: tiles, their rounds, and which blocks of channels are whose."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

T = gl.constexpr(64)  # tokens of a tile
STAGES = gl.constexpr(3)  # blocks of the four streams on their way or in work
AHEAD = gl.constexpr(2)  # blocks of a tile before the norm of the one before


@gluon.jit
def here(width, tokens, SPLITS: gl.constexpr):
    """Of this program: its first block of channels and how many, the first tile and how many."""
    split = gl.program_id(0)
    group = gl.program_id(1)
    blocks = width // 64
    first = split * blocks // SPLITS
    count = (split + 1) * blocks // SPLITS - first
    tiles = (tokens + T - 1) // T
    groups = gl.num_programs(1)
    return first, count, group, (tiles - group + groups - 1) // groups


@gluon.jit
def share(SPLITS: gl.constexpr):
    """What this program adds to a counter of its group: together 64."""
    each: gl.constexpr = 64 // SPLITS
    return gl.where(gl.program_id(0) == 0, 64 - (SPLITS - 1) * each, each)
