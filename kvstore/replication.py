"""Copies of runs that are hit often, made in the background by the run's owner, within a bandwidth limit.

A put is acknowledged when it is durable on the owner; copies come later and are never waited for. A page that
was read ``copy_after_hits`` times lives on ``copies`` nodes; when the second holder changes, or begins anew,
it gets what it lacks. What a client put here because the owner was away goes to the owner in the same way. A
node that does not take its copies is asked again, less and less often, for as long as the run is remembered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.members import Member
from cedar.kvstore.pace import Pace
from cedar.kvstore.peers import Peers
from cedar.kvstore.placement import run_of, runs_of

log = logging.getLogger(__name__)

MAX_PAGES_A_RUN: Final = 1024
"""Chains that part within a run have pages in it too, so it may have more than are in one chain."""
MAX_DOUBLINGS: Final = 6
"""Of the pause before a copy that failed is tried again."""


class _Holder(NamedTuple):
    """A process that was sent pages: another one of the same node may not have kept them."""

    node_id: str
    incarnation: int


@dataclass
class _Run:
    """A run that is to be on several nodes."""

    pages: dict[bytes, None] = field(default_factory=dict)  # those that are hit often, in order
    attempts: int = 0  # that failed since the members changed
    sent: dict[_Holder, set[bytes]] = field(default_factory=dict)


class Replication:
    """Counts hits and sends copies. ``frame``: one page for a peer, None when it is not held here."""

    def __init__(
        self,
        node_id: str,
        feed: MemberFeed,
        peers: Peers,
        config: PeerConfig,
        *,
        frame: Callable[[bytes], Awaitable[bytes | None]],
        count: Callable[[str, float], None],
        now_s: Callable[[], float],
    ) -> None:
        self._node_id = node_id
        self._feed = feed
        self._peers = peers
        self._config = config
        self._frame = frame
        self._count = count
        self._now_s = now_s
        self._pace = Pace(config.copy_bytes_per_s)
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()
        self._queue: OrderedDict[bytes, float] = OrderedDict()  # run -> since when, on the running clock
        self._not_before_s: dict[bytes, float] = {}  # of runs in the queue whose last copy failed
        self._more = asyncio.Event()
        self._epoch = 0

    @property
    def waiting(self) -> int:
        """Runs whose copies are behind."""
        return len(self._queue)

    def stats(self) -> dict[str, float]:
        """Gauges, by name."""
        waiting_since_s = min(list(self._queue.values()), default=None)
        lag_s = 0.0 if waiting_since_s is None else max(self._now_s() - waiting_since_s, 0.0)
        return {"store_replication_queue_runs": float(self.waiting), "store_replication_lag_s": lag_s}

    def hit(self, keys: Sequence[bytes]) -> None:
        """These pages were served to a client."""
        if self._alone:
            return
        for run in runs_of(keys):
            state = self._runs.get(run.tag)
            known = state.pages if state is not None else ()
            hot = [key for key in keys[run.start : run.end] if key not in known and self._is_hot(key)]
            if hot or (state is not None and self._behind(run.tag, state)):
                self._grown(run.tag, hot)

    def stored(self, keys: Sequence[bytes]) -> None:
        """These pages have been put here by a client; if their owner did not take them, it gets them now."""
        members = self._feed.current
        for run in runs_of(keys) if len(members.members) > 1 else ():
            owner = members.owner(run.tag)
            if self._config.copy_after_hits == 0 or (owner is not None and owner.node_id != self._node_id):
                self._grown(run.tag, keys[run.start : run.end])

    def copied(self, key: bytes) -> Member | None:
        """The node that is known to hold a page of this one too."""
        state = self._runs.get(run_of(key))
        if state is not None:
            for target in self._targets(run_of(key)):
                if key in state.sent.get(_holder(target), ()):
                    return target
        return None

    def last_copied(self, keys: Sequence[bytes]) -> list[bytes]:
        """Of each run among ``keys`` that has copies, the last page up to which all have one."""
        found = []
        for run in runs_of(keys) if self._runs else ():
            if run.tag in self._runs:
                copied = list(takewhile(self.copied, keys[run.start : run.end]))
                found += copied[-1:]
        return found

    def second_holder(self, tag: bytes) -> Member | None:
        """Who would have the copy, if there is one: asked when a page that was here has gone bad."""
        return next(iter(self._targets(tag)), None)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These pages are gone."""
        for key in keys:
            self._hits.pop(key, None)
            self._runs.pop(run_of(key), None)
            self._dequeue(run_of(key))

    async def run(self) -> None:
        """Send copies until cancelled."""
        while True:
            tag = await self._next()
            try:
                done = await self._send(tag)
            except Exception:
                log.exception("a copy failed")
                done = False
            state = self._runs.get(tag)
            if done or state is None:
                self._dequeue(tag)
            else:
                pause_s = self._config.retry_s * 2 ** min(state.attempts, MAX_DOUBLINGS)
                state.attempts += 1
                self._not_before_s[tag] = self._now_s() + pause_s

    async def follow(self) -> None:
        """When the members change, look at every run that should be on two nodes again."""
        while True:
            members = await self._feed.newer(self._epoch)
            self._epoch = members.epoch
            listed = {_holder(member) for member in members.members}
            for tag, state in list(self._runs.items()):
                for holder in [holder for holder in state.sent if holder not in listed]:
                    del state.sent[holder]
                state.attempts = 0
                self._not_before_s.pop(tag, None)
                self._enqueue(tag)

    async def _next(self) -> bytes:
        """The run that has waited longest, of those whose pause is over."""
        while True:
            now_s = self._now_s()
            for tag in self._queue:
                if self._not_before_s.get(tag, now_s) <= now_s:
                    return tag
            self._more.clear()
            try:
                soonest_s = min(self._not_before_s.values(), default=None)
                async with asyncio.timeout(None if soonest_s is None else soonest_s - now_s):
                    await self._more.wait()
            except TimeoutError:
                continue

    async def _send(self, tag: bytes) -> bool:
        """Whether every holder of a run has all of it now."""
        state = self._runs.get(tag)
        if state is None:
            return True
        for target in self._targets(tag):
            sent = state.sent.setdefault(_holder(target), set())
            wanted = [key for key in state.pages if key not in sent]
            if not wanted:
                continue
            peer = self._peers.of(target)
            there = await peer.held(b"", wanted)
            if there is None:
                return False
            sent.update(key for key, held in zip(wanted, there.held, strict=True) if held)
            frames: dict[bytes, bytes] = {}
            for key in wanted:
                frame = None if key in sent else await self._frame(key)
                if frame is not None:
                    frames[key] = frame
                elif key not in sent:
                    state.pages.pop(key, None)  # it is gone here
            if not frames:
                continue
            await self._pace.take(sum(map(len, frames.values())))
            if await peer.copy(list(frames.values()), len(frames)) < len(frames):
                return False
            sent.update(frames)
            self._count("store_pages_copied_out", len(frames))
        return not self._behind(tag, state)

    def _targets(self, tag: bytes) -> list[Member]:
        """Who else should have what is hot here: the next holders, or the owner if this node is not."""
        members = self._feed.current
        holders = members.holders(tag)
        mine = bool(holders) and holders[0].node_id == self._node_id
        return holders[1 : members.copies or self._config.copies] if mine else holders[:1]

    @property
    def _alone(self) -> bool:
        members = self._feed.current
        return (members.copies or self._config.copies) < 2 or len(members.members) < 2

    def _is_hot(self, key: bytes) -> bool:
        """Count a hit of a page; whether it has had enough of them."""
        hits = self._hits.pop(key, 0) + 1
        if hits >= self._config.copy_after_hits:
            return True
        self._hits[key] = hits
        if len(self._hits) > self._config.remembered_pages:
            self._hits.popitem(last=False)
        return False

    def _grown(self, tag: bytes, keys: Sequence[bytes]) -> None:
        """These pages of a run are to be on several nodes."""
        state = self._runs.get(tag)
        if state is None:
            state = self._runs[tag] = _Run()
            if len(self._runs) > self._config.remembered_pages // 16:
                old, _ = self._runs.popitem(last=False)
                self._dequeue(old)
        else:
            self._runs.move_to_end(tag)
        for key in keys:
            if len(state.pages) < MAX_PAGES_A_RUN:
                state.pages[key] = None
        if self._behind(tag, state):
            self._enqueue(tag)

    def _behind(self, tag: bytes, state: _Run) -> bool:
        return any(
            not state.pages.keys() <= state.sent.get(_holder(target), set()) for target in self._targets(tag)
        )

    def _enqueue(self, tag: bytes) -> None:
        self._queue.setdefault(tag, self._now_s())
        self._more.set()

    def _dequeue(self, tag: bytes) -> None:
        self._queue.pop(tag, None)
        self._not_before_s.pop(tag, None)


def _holder(member: Member) -> _Holder:
    return _Holder(member.node_id, member.incarnation)
