"""The ways in which a prompt's state may come to be, each a row of the quality table (spec §9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the prompt's state comes to be. `hit`: share of the prompt found, rounded down to whole pages."""

    name: str
    replay: bool = True
    hit: float = 0.0
    record: bool = False  # the hit has its window record
    exact: bool = False  # the hit is replayed from so far back that no bound is felt
    pool: bool = True
    drafting: bool = False
    packed: bool = True  # False: entries and index keys in bf16; the differentiable network alone can do that


WAYS: Final = (
    Way(name="cold, bounded replay"),
    Way(name="cold, every layer for every token", replay=False),
    Way(name="cold, no candidate pool", pool=False),
    Way(name="hit at 1/2, window record", hit=0.5, record=True),
    Way(name="hit at 1/2, replay", hit=0.5),
    Way(name="hit at 9/10, replay", hit=0.9),
)
SERVED_WAYS: Final = (
    *WAYS,
    Way(name="hit at 1/4, replay", hit=0.25),
    Way(name="hit at 1/2, exact replay", hit=0.5, exact=True),
    Way(name="cold, bounded replay, drafting", drafting=True),
    Way(name="hit at 1/2, window record, drafting", hit=0.5, record=True, drafting=True),
)
UNPACKED: Final = Way(name="cold, bf16 entries", packed=False)
