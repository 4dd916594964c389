"""A store node as a Ray actor: its process, its place in the directory, its end.

Ray restarts it when its process dies; the pages are on disk, window state is gone and replay rebuilds it.
A node of several joins their list before it appears in the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets

from cedar.cluster.announcer import Announcer
from cedar.cluster.config import ClusterConfig
from cedar.cluster.deployments import listen_host
from cedar.cluster.directory import Worker
from cedar.cluster.directory_client import RayDirectory
from cedar.cluster.loop_thread import LoopThread
from cedar.cluster.tenants import load_secret
from cedar.cluster.worker_configs import peer_config, store_config
from cedar.kvstore.node import StoreNode

log = logging.getLogger(__name__)
RETRY_S = 0.1


class StoreActor:
    """``directory``: the folder of this node's pages; ``index``: its number; ``secret_directory``: see
    ``tenants.load_secret``. Runs its node on an event loop of its own thread, so that the constructor, which
    Ray calls again after a restart, is all that is needed."""

    def __init__(
        self, config: ClusterConfig, directory: str, index: int = 0, secret_directory: str | None = None
    ) -> None:
        self._config = config
        secret = load_secret(config.gateway.auth, secret_directory) if config.store.tenants else b""
        host = listen_host(config.store.host)
        self._node_config = store_config(config, directory, host, index=index, secret=secret)
        self._directory = RayDirectory(config.ray.namespace)
        self._stopped = False
        self._draining = False
        self._target = ""
        self._moving: asyncio.Task[None] | None = None
        self._loop = LoopThread("store-node")
        self._loop.run(self._start())

    def ready(self) -> str:
        """The address; answers once the node serves."""
        return self._node.address

    def stop(self, drain_s: float = 0.0) -> None:
        """Say goodbye, write what waits, close. Idempotent.

        ``drain_s``: first give the other nodes so long to take over what this one holds. Not when the whole
        store ends: then each keeps its own.
        """
        self._loop.run(self._stop(drain_s))

    async def _start(self) -> None:
        if self._config.store.nodes > 1:
            self._target = await self._find_list()
        self._incarnation = secrets.randbits(62) | 1
        self._node = StoreNode(self._node_config, peers=peer_config(self._config, self._target))
        await self._node.start()
        if self._target:
            await self._listed()
        follow = self._list_moved if self._target else None
        self._announcer = Announcer(
            self._directory, self._describe, self._config.directory.heartbeat_s, follow
        )
        await self._announcer.announce()
        self._announcer.start()

    async def _find_list(self) -> str:
        """Where the member list is, from the directory, which may be starting itself."""
        while True:
            with contextlib.suppress(ConnectionError):
                if target := (await self._directory.view()).store:
                    return target
            await asyncio.sleep(RETRY_S)

    async def _listed(self) -> None:
        """Wait to be listed. A predecessor that was killed holds the name until its lease has run out."""
        part = self._node.part
        try:
            async with asyncio.timeout(3 * self._config.store.lease_s):
                while True:
                    members = part.feed.current
                    member = members.find(part.node_id)
                    if member is not None and member.incarnation == part.incarnation:
                        return
                    await part.feed.newer(members.epoch)
        except TimeoutError:
            log.warning("the store node %s serves, and is not listed yet", part.node_id)

    def _list_moved(self, target: str | None) -> None:
        if target and target != self._target and self._moving is None:
            self._moving = asyncio.create_task(self._move())

    async def _move(self) -> None:
        """The member list is served elsewhere: begin again there, with the pages on disk."""
        log.warning("the store's member list has moved; this node begins again")
        await self._announcer.stop()
        await self._node.stop()
        await self._start()
        self._moving = None

    async def _stop(self, drain_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._moving is not None:
            await asyncio.wait([self._moving])
        if drain_s > 0 and self._target:
            self._draining = True
            await self._announcer.announce()
            await self._node.drain(drain_s)
        await self._announcer.stop()
        await self._node.stop()

    def _describe(self) -> Worker:
        return Worker(
            stage="store",
            address=self._node.address,
            incarnation=self._incarnation,
            pid=os.getpid(),
            draining=self._draining,
        )
