"""Look up a whole chain on several nodes at once, in one round trip.

Each node is asked for the pages that it holds, in their order, and says how many leading ones of them it has;
the chain is held up to the first page that is missing anywhere. For a node that fails or is late, the next
holders of its runs are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cedar.kvstore.chain_plan import Plan
from cedar.kvstore.client import Match
from cedar.kvstore.hedge import HedgeTimer, hedged
from cedar.kvstore.keys import HEAD_PAGES
from cedar.kvstore.node_client import NodeClient
from cedar.kvstore.placement import by_holder, run_of, runs_of
from cedar.kvstore.window_tier import WindowName, longest_first


async def match_chain(
    plan: Plan,
    root: bytes,
    keys: Sequence[bytes],
    *,
    tenant: bytes,
    timer: HedgeTimer,
    count: Callable[[str], None],
) -> Match:
    """How much of the chain is held, and the window records at it, the longest first."""
    windows: set[WindowName] = set()
    now_s = asyncio.get_running_loop().time

    async def ask(node: NodeClient, positions: Sequence[int]) -> int | None:
        """The first of these pages that the node lacks; None when it does not answer."""
        began_s = now_s()
        whole = len(positions) == len(keys)
        match = await node.try_match(root, keys if whole else [keys[p] for p in positions], tenant)
        if match is None:
            return None
        timer.answered(now_s() - began_s)
        windows.update(match.windows)
        return positions[match.pages] if match.pages < len(positions) else len(keys)

    async def first_missing(positions: Sequence[int], level: int) -> int:
        if level == 0 and len(plan.members.members) == 1:
            return await ask_group(plan.holders(run_of(root))[0], positions, 0)
        groups = by_holder(runs_of(keys, positions), lambda tag: plan.holder(tag, level))
        if sum(map(len, groups.values())) < len(positions):
            return positions[0]
        return min(await asyncio.gather(*(ask_group(n, p, level) for n, p in groups.items())))

    async def ask_group(node: NodeClient, positions: Sequence[int], level: int) -> int:
        if plan.is_last(level):
            answer = await ask(node, positions)
            return positions[0] if answer is None else answer
        return await hedged(
            ask(node, positions),
            lambda: first_missing(positions, level + 1),
            enough=lambda missing: missing > positions[-1],
            after_s=timer.delay_s,
            count=count,
        )

    async def ask_root() -> int:
        """Records at the root belong to prompts shorter than a page: of use to short prompts alone."""
        for node in plan.holders(run_of(root))[:1]:
            if not keys or node not in plan.holders(run_of(keys[0]))[:1]:
                await ask(node, [])
        return 0

    pages = 0
    if keys:
        others = [ask_root()] if len(keys) <= HEAD_PAGES else []
        pages, *_ = await asyncio.gather(first_missing(range(len(keys)), 0), *others)
    else:
        await ask_root()
    at = {root, *keys[:pages]}
    known = sorted((w for w in windows if w.page_key in at), key=longest_first)
    return Match(pages, tuple(known))
