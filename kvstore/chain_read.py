"""Read a chain from several nodes: one stream from each, merged in order, hedged by the next holders."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

from cedar.kvstore.chain_plan import Plan
from cedar.kvstore.hedge import HedgeTimer
from cedar.kvstore.node_client import NodeClient, short_name
from cedar.kvstore.ordered_read import PageSource, read_run
from cedar.kvstore.placement import Run, runs_of

REMEMBERED_COPIES: Final = 16_384


class KnownCopies:
    """Which pages are known to be on a second node, from what owners say as they serve them."""

    def __init__(self, rng: random.Random, count: Callable[[str], None]) -> None:
        self._rng = rng
        self._count = count
        self._copied: OrderedDict[str, int] = OrderedDict()  # page: the list under which it has a copy

    def learn(self, page: str, epoch: int) -> None:
        """A page (``short_name``), and those before it in its run, have a copy under this list."""
        self._copied[page] = epoch
        self._copied.move_to_end(page)
        if len(self._copied) > REMEMBERED_COPIES:
            self._copied.popitem(last=False)

    def order(self, plan: Plan, keys: Sequence[bytes], start: int) -> dict[Run, list[NodeClient]]:
        """The runs from ``start`` on, each with its holders in the order to ask.

        The part of a run that is known to be on two nodes is read from the less busy one.
        """
        order = {}
        for run in runs_of(keys, range(start, len(keys))):
            holders = plan.holders(run.tag)
            copied = self._copied_part(plan, keys, run) if len(holders) > 1 else run.start
            if copied > run.start:
                order[Run(run.tag, run.start, copied)] = self._less_busy_first(holders)
            if copied < run.end:
                order[Run(run.tag, copied, run.end)] = holders
        return order

    def _copied_part(self, plan: Plan, keys: Sequence[bytes], run: Run) -> int:
        """Where the part of a run ends that is known to have a copy."""
        if self._copied and plan.copies > 1:
            for position in reversed(range(run.start, run.end)):
                if self._copied.get(short_name(keys[position])) == plan.members.epoch:
                    return position + 1
        return run.start

    def _less_busy_first(self, holders: list[NodeClient]) -> list[NodeClient]:
        first, second = holders[:2]
        busier = first.reads_in_flight - second.reads_in_flight
        if second.resting or busier < 0 or (busier == 0 and self._rng.random() < 0.5):
            return holders
        self._count("reads_from_copy")
        return [second, first, *holders[2:]]


async def read_chain(
    plan: Plan,
    keys: Sequence[bytes],
    start: int,
    *,
    copies: KnownCopies,
    timer: HedgeTimer,
    count: Callable[[str], None],
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """(position, value) of the pages from ``start`` on, in order, up to the first that nobody gives."""
    bell = asyncio.Event()
    order = copies.order(plan, keys, start)
    groups: dict[NodeClient, list[int]] = {}
    for run, holders in order.items():
        if holders:
            groups.setdefault(holders[0], []).extend(range(run.start, run.end))

    def open_stream(node: NodeClient, positions: Sequence[int]) -> PageSource:
        return PageSource(node.read([keys[p] for p in positions]), positions, bell)

    streams = {node: open_stream(node, positions) for node, positions in groups.items()}
    slow: set[NodeClient] = set()
    try:
        for run, holders in order.items():
            if not holders:
                return
            first = holders[0]
            if streams[first].ended and not first.resting:
                # It ended at a page of an earlier run, which says nothing of this one.
                await streams[first].close()
                streams[first] = open_stream(first, [p for p in groups[first] if p >= run.start])
            further = _Further(holders[1 : plan.copies], open_stream)
            pages = read_run(
                run,
                [streams[first]],
                further.open,
                bell=bell,
                timer=timer,
                count=count,
                patient=first not in slow,
            )
            position = run.start
            async with aclosing(pages):
                async for position, value in pages:
                    yield position, value
                    position += 1
            if further.opened:
                slow.add(first)
            if position < run.end:
                return
    finally:
        for source in streams.values():
            await source.close()


class _Further:
    """The holders of a run that are still to be asked."""

    def __init__(
        self,
        nodes: Sequence[NodeClient],
        open_stream: Callable[[NodeClient, Sequence[int]], PageSource],
    ) -> None:
        self._nodes = list(nodes)
        self._open_stream = open_stream
        self.opened = False

    def open(self, position: int, end: int) -> PageSource | None:
        """The next one's stream of pages ``[position, end)``; None when there is none."""
        if not self._nodes:
            return None
        self.opened = True
        return self._open_stream(self._nodes.pop(0), range(position, end))
