"""A store node as a Ray actor: its process, its place in the directory, its end.

Ray restarts it when its process dies; the pages are on disk, window state is gone and replay rebuilds it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine

from cedar.cluster.announcer import Announcer
from cedar.cluster.config import ClusterConfig
from cedar.cluster.deployments import listen_host
from cedar.cluster.directory import Worker
from cedar.cluster.directory_client import RayDirectory
from cedar.cluster.worker_configs import store_config
from cedar.kvstore.node import StoreNode


class StoreActor:
    """``directory``: the folder of this node's pages. Runs its node on an event loop of its own thread, so
    that
    the constructor, which Ray calls again after a restart, is all that is needed."""

    def __init__(self, config: ClusterConfig, directory: str) -> None:
        self._config = config
        self._node = StoreNode(store_config(config, directory, listen_host(config.store.host)))
        self._incarnation = secrets.randbits(62) | 1
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="store-node", daemon=True).start()
        self._on_loop(self._start())

    def ready(self) -> str:
        """The address; answers once the node serves."""
        return self._node.address

    def stop(self) -> None:
        """Say goodbye, write what waits, close. Idempotent."""
        self._on_loop(self._stop())

    def _on_loop(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        await self._node.start()
        directory = RayDirectory(self._config.ray.namespace)
        self._announcer = Announcer(directory, self._describe, self._config.directory.heartbeat_s)
        await self._announcer.announce()
        self._announcer.start()

    async def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        await self._announcer.stop()
        await self._node.stop()

    def _describe(self) -> Worker:
        return Worker(
            stage="store", address=self._node.address, incarnation=self._incarnation, pid=os.getpid()
        )
