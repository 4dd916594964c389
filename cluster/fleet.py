"""The workers as the gateway sees them now: last view, channels, own requests in flight, who held what.

One owner, one event loop. Picking is ``cedar.cluster.router``; this keeps the facts that it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc
from cedar.cluster.config import DirectorySettings
from cedar.cluster.directory import View, ViewKeeper, Worker
from cedar.cluster.directory_client import Directory
from cedar.cluster.errors import NoWorker
from cedar.cluster.router import Affinity, RoutingPolicy, candidates, choose, choose_by_hash
from cedar.kvstore.rpc import channel_options

Excluded = Collection[tuple[str, int]]


class Fleet:
    """``start()`` looks at the directory once and then every ``poll_s``; without it the last view stays."""

    def __init__(
        self, directory: Directory, settings: DirectorySettings, policy: RoutingPolicy | None = None
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._policy = policy or RoutingPolicy()
        self._task: asyncio.Task[None] | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._changed = asyncio.Condition()
        self._keeper = ViewKeeper(settings.expire_after_s)
        self._affinity = {"prefill": Affinity(), "decode": Affinity()}
        self._turn = 0
        self._picked: dict[str, int] = {}
        self._suspected: dict[tuple[str, int], int] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.in_flight: Counter[str] = Counter()
        self.view_age_s = 0.0

    async def start(self) -> None:
        """Look once, then go on looking."""
        await self._look()
        self._task = asyncio.create_task(self._poll(), name="fleet")

    async def stop(self) -> None:
        """Stop looking and close every channel."""
        tasks = [*self._background, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    @property
    def view(self) -> View:
        """Who is alive, as far as we know."""
        return self._keeper.view

    @property
    def following(self) -> bool:
        """Whether the view is being kept up to date."""
        return self._task is not None and not self._task.done()

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        """A channel to this worker, kept while it is in the view."""
        if worker.address not in self._channels:
            self._channels[worker.address] = grpc.aio.insecure_channel(
                worker.address, options=channel_options()
            )
        return self._channels[worker.address]

    def pick(
        self, stage: str, keys: Sequence[bytes], excluded: Excluded, fingerprint: bytes, needed_pages: int = 0
    ) -> Worker:
        """A Prefill or Decode worker for a prompt with these page keys. Raises ``NoWorker``."""
        found = candidates(
            self.view,
            stage,
            pages=self._affinity[stage].leading(keys),
            in_flight=self.in_flight,
            picked=self._picked,
            excluded={*excluded, *self._suspected},
            fingerprint=fingerprint,
            needed_pages=needed_pages,
        )
        best = choose(found, self._policy)
        if best is None:
            raise NoWorker(stage, f"{len(self.view.all(stage))} known, {len(excluded)} excluded")
        self._turn += 1
        self._picked[best.worker.address] = self._turn
        return best.worker

    def pick_encoder(self, content_hash: bytes, excluded: Excluded) -> Worker:
        """The Encoder that this image always goes to. Raises ``NoWorker``."""
        worker = choose_by_hash(self.view, "encoder", content_hash, {*excluded, *self._suspected})
        if worker is None:
            raise NoWorker("encoder", f"{len(self.view.all('encoder'))} known, {len(excluded)} excluded")
        return worker

    def held(self, worker: Worker, keys: Sequence[bytes]) -> None:
        """Remember that this worker holds these pages now."""
        self._affinity[worker.stage].record(keys, worker.address)

    @contextmanager
    def working(self, worker: Worker) -> Iterator[None]:
        """Count one request at this worker for the time of the block."""
        self.in_flight[worker.address] += 1
        try:
            yield
        finally:
            self.in_flight[worker.address] -= 1
            if self.in_flight[worker.address] <= 0:
                del self.in_flight[worker.address]

    def suspect(self, worker: Worker) -> None:
        """This process could not be reached: use no more, and tell the directory."""
        self._suspected[(worker.address, worker.incarnation)] = worker.sequence
        for affinity in self._affinity.values():
            affinity.forget(worker.address)
        task = asyncio.create_task(self._report(worker))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def changed(self, timeout_s: float) -> None:
        """Wait for another view, or for the time to pass."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait()

    async def _report(self, worker: Worker) -> None:
        with contextlib.suppress(ConnectionError):
            await self._directory.suspect(worker.address, worker.incarnation)
        await self._look()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            await self._look()

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        try:
            fresh = await self._directory.view()
        except ConnectionError:
            self.view_age_s += self._settings.poll_s
            return
        self.view_age_s = 0.0
        before = self.view
        self._keeper.update(fresh, now_s)
        changed = (before.version, before.epoch, len(before.workers)) != (
            self.view.version,
            self.view.epoch,
            len(self.view.workers),
        )
        announced = {(w.address, w.incarnation): w.sequence for w in fresh.workers}
        # Ours to drop once the worker has announced itself again, or is no longer known.
        self._suspected = {
            key: sequence
            for key, sequence in self._suspected.items()
            if announced.get(key, sequence + 1) <= sequence
        }
        if changed:
            await self._forget_gone()
            async with self._changed:
                self._changed.notify_all()

    async def _forget_gone(self) -> None:
        known = {w.address for w in self.view.workers}
        for address in [a for a in self._channels if a not in known and not self.in_flight[a]]:
            await self._channels.pop(address).close(None)
        self._picked = {a: turn for a, turn in self._picked.items() if a in known}
