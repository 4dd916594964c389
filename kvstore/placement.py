"""Which node holds what: weighted rendezvous hashing over runs of a chain. Pure.

A *run* is a few consecutive pages of one chain, and the first bytes of a page's key name its run (``keys``),
so anyone who has a key can place it. Runs, not pages, are placed: a long prefix is read from few nodes in
large streams, and different runs of it from different nodes at once.

Each node gives each run a score from nothing but the run, the node's name and its weight. The nodes in order
of score are the run's holders: the first owns it, the second has the copy if there is one. When a node comes
or goes, only the runs move that it wins or loses: 1/N of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import xxhash
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.keys import RUN_TAG_BYTES

N = TypeVar("N", bound=Hashable)
_CACHED_RUNS: Final = 65_536
_UNIT: Final = 2.0**-64


def run_of(key: bytes) -> bytes:
    """The run that a page (or a root) belongs to."""
    return key[:RUN_TAG_BYTES]


@dataclass(frozen=True)
class Run:
    """Pages ``[start, end)`` of a list of keys, all of one run."""

    tag: bytes
    start: int
    end: int


def runs_of(keys: Sequence[bytes], positions: Iterable[int] | None = None) -> list[Run]:
    """Cut a list of keys (the part of it at ``positions``, ascending) into its runs."""
    runs: list[Run] = []
    tag = b""
    start = end = -1
    for position in range(len(keys)) if positions is None else positions:
        here = keys[position][:RUN_TAG_BYTES]
        if here != tag or position != end:
            if end > start:
                runs.append(Run(tag, start, end))
            tag, start = here, position
        end = position + 1
    if end > start:
        runs.append(Run(tag, start, end))
    return runs


def score(tag: bytes, name: bytes, weight: float) -> float:
    """How much a node wants a run. The chance to be the highest of several is proportional to ``weight``."""
    uniform = (xxhash.xxh3_64_intdigest(tag + name) + 0.5) * _UNIT
    return -weight / math.log(uniform)


class Placement:
    """Ranks nodes for runs; ``weights`` by node name. Remembers what it ranked."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise InvalidRequest(f"weight of {name}", weight, "above 0 and finite")
        self._nodes = [(name, name.encode(), weight) for name, weight in sorted(weights.items())]
        self._ranked: dict[bytes, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def ranked(self, tag: bytes) -> tuple[str, ...]:
        """Every node, the one that wants the run most first."""
        found = self._ranked.get(tag)
        if found is None:
            order = sorted(self._nodes, key=lambda node: score(tag, node[1], node[2]), reverse=True)
            found = tuple(name for name, _, _ in order)
            if len(self._ranked) >= _CACHED_RUNS:
                self._ranked.clear()
            self._ranked[tag] = found
        return found


def by_holder(runs: Iterable[Run], holder: Callable[[bytes], N | None]) -> dict[N, list[int]]:
    """Positions of the pages that each node holds, in order; runs without a holder are left out."""
    groups: dict[N, list[int]] = {}
    for run in runs:
        node = holder(run.tag)
        if node is not None:
            groups.setdefault(node, []).extend(range(run.start, run.end))
    return groups
