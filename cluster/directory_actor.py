"""The directory as a Ray actor: the pure state, a clock, and the member list of a store of several nodes.

Ray restarts it when its process dies; it comes back empty, with another epoch, and fills up within a
heartbeat. The store's list comes back from its file (``cedar.cluster.store_membership``).
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from cedar.cluster.directory import DirectoryState, View, Worker

if TYPE_CHECKING:
    from cedar.cluster.config import ClusterConfig


class DirectoryActor:
    """Runs on one event loop, so every method is atomic. ``expire_after_s``: see ``DirectoryState``.

    ``config``: of a cluster whose store has several nodes; ``folder``: where their list is kept.
    """

    def __init__(self, expire_after_s: float, config: ClusterConfig | None = None, folder: str = "") -> None:
        store = ""
        if config is not None:
            from cedar.cluster.deployments import listen_host
            from cedar.cluster.store_membership import started

            self._membership = started(config, folder, listen_host(config.store.host))
            store = self._membership.target
        self._state = DirectoryState(expire_after_s, epoch=secrets.randbits(62), store=store)

    async def announce(self, worker: Worker) -> int:
        """Register or refresh a worker; returns the view's version."""
        now_s = time.monotonic()
        self._state.expire(now_s)
        self._state.announce(worker, now_s)
        return self._state.version

    async def leave(self, address: str, incarnation: int) -> None:
        """A worker says goodbye."""
        self._state.leave(address, incarnation, time.monotonic())

    async def suspect(self, address: str, incarnation: int) -> None:
        """A client could not reach this process."""
        self._state.suspect(address, incarnation)

    async def view(self) -> View:
        """Who is alive now."""
        self._state.expire(time.monotonic())
        return self._state.view()

    async def ready(self) -> bool:
        """Answers once the actor runs."""
        return True
