"""What makes a store node one of several: its name, the member list, and the work in the background.

``StoreNode`` owns one of these when it is configured with peers. It joins the membership, settles under each
list (``rebalance``), copies what is hit often (``replication``), finds what has not arrived yet
(``read_through``), and carries out purges.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import NodeConfig
from cedar.kvstore.errors import Refused, StoreClosed
from cedar.kvstore.frames import FRAME_BYTES, FrameKind, encode_frame, record_checksum
from cedar.kvstore.member_feed import FileFeed, MemberFeed, ServiceFeed
from cedar.kvstore.members import MAX_NODE_ID, MemberList
from cedar.kvstore.membership_agent import MembershipAgent
from cedar.kvstore.peers import CopiedPage, Peers
from cedar.kvstore.placement import run_of
from cedar.kvstore.purges import Purges
from cedar.kvstore.put import PutItem
from cedar.kvstore.read_through import ReadThrough
from cedar.kvstore.rebalance import Rebalance
from cedar.kvstore.replication import Replication
from cedar.kvstore.rpc import transport_options
from cedar.kvstore.ssd_tier import SsdTier
from cedar.kvstore.stats import Counters
from cedar.kvstore.window_tier import WindowName, WindowTier
from cedar.v1 import store_pb2, store_peer_pb2

log = logging.getLogger(__name__)
_KEEP_POLL_S = 0.01


class ClusterPart:
    """One node's part in a cluster; event loop only, except where said."""

    def __init__(
        self,
        node_config: NodeConfig,
        config: PeerConfig,
        *,
        ssd: SsdTier,
        windows: WindowTier,
        readers: ThreadPoolExecutor,
        counters: Counters,
        feed: MemberFeed | None = None,
    ) -> None:
        self.node_config = node_config
        self.config = config
        self.ssd = ssd
        self.node_id = _node_id(config, node_config)
        self.incarnation = secrets.randbits(62) | 1
        self._windows = windows
        self._readers = readers
        self._counters = counters
        self.feed = feed or _feed(config, node_config)
        self.purges = Purges(node_config.ssd.directory / "purges.json")
        options = transport_options(
            max_message_bytes=node_config.max_message_bytes,
            keepalive_s=node_config.keepalive_s,
            keepalive_timeout_s=node_config.keepalive_timeout_s,
        )
        self.peers = Peers(
            self.node_id, self.feed, config, node_config.tls, options.channel, lambda name: counters.add(name)
        )
        self.rebalance = Rebalance(
            self.node_id, self.feed, self.peers, config, held=ssd.held, keep=self.keep, count=counters.add
        )
        self.replication = Replication(
            self.node_id, self.feed, self.peers, config, frames=self._frames, count=counters.add
        )
        self.read_through = ReadThrough(
            self.node_id,
            self.feed,
            self.peers,
            self.rebalance,
            self.replication,
            keep=self.keep,
            lost=ssd.lost,
            count=counters.add,
        )
        self._agent: MembershipAgent | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._purging = asyncio.Lock()

    # ---- life ----

    async def prepare(self) -> None:
        """Before the node serves: follow the list, finish purges, learn those that were missed."""
        await self.feed.start()
        for tenant in self.purges.unfinished:
            await self._forget(tenant)
            self.purges.finish(tenant)
        await self._meet_peers()

    async def start(self, address: str) -> None:
        """The node serves at ``address``: join, and begin the work in the background."""
        if self.config.membership and isinstance(self.feed, ServiceFeed):
            self._agent = MembershipAgent(
                self.config.membership,
                self.feed,
                node_id=self.node_id,
                address=self.config.advertise or address,
                incarnation=self.incarnation,
                weight=self.config.weight,
                settled_epoch=lambda: self.rebalance.settled_epoch,
                tls=self.node_config.tls,
            )
            await self._agent.start()
        loop = asyncio.get_running_loop()
        work = (
            self.rebalance.run(),
            self.replication.run(),
            self.replication.follow(),
            self._keep_meeting(),
        )
        self._tasks = [loop.create_task(each) for each in work]

    async def drain(self, timeout_s: float) -> bool:
        """Hand over: no more writes come here, and the others take what they now own."""
        return self._agent is None or await self._agent.drain(timeout_s)

    async def leave(self) -> None:
        """Leave the list; calls under way go on."""
        if self._agent is not None:
            await self._agent.stop()

    async def stop(self) -> None:
        """End the work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.read_through.close()
        await self.peers.close()
        await self.feed.stop()

    # ---- pages between nodes ----

    async def keep(self, pages: Sequence[CopiedPage]) -> int:
        """Store pages that another node had, with the age they have there; how many are here now."""
        now_s = self.ssd.now_s()
        items = [
            PutItem(p.key, p.value, p.page_index, p.tenant, used_s=now_s - p.idle_s)
            for p in pages
            if not p.tenant or p.purged_ms >= self.purges.newest_ms(p.tenant)
        ]
        if len(items) < len(pages):
            self._counters.add("store_copies_refused_purged", len(pages) - len(items))
        if not items:
            return 0
        give_up_s = asyncio.get_running_loop().time() + self.node_config.put_wait_s
        while True:
            try:
                counts = await asyncio.wrap_future(self.ssd.put(items))
                return counts.stored + counts.present + counts.conflicts
            except StoreClosed:
                return 0
            except Refused:
                if asyncio.get_running_loop().time() >= give_up_s:
                    return 0
                await asyncio.sleep(_KEEP_POLL_S)

    def frame_for_peer(self, keys: Sequence[bytes]) -> tuple[bytes, int] | None:
        """On a reader thread: a frame of leading pages of one run, with what is known of them."""
        run = [key for key in keys if run_of(key) == run_of(keys[0])]
        facts = self.ssd.facts(keys[0])
        if facts is None:
            return None
        page_index, tenant, idle_s = facts

        def build(views: list[memoryview]) -> bytes:
            meta = store_pb2.StoredMeta(
                page_keys=b"".join(run[: len(views)]),
                value_bytes=len(views[0]),
                first_page=page_index,
                tenant=tenant,
                idle_s=max(int(idle_s), 0),
                purged_ms=self.purges.newest_ms(tenant),
            )
            return encode_frame(FrameKind.PAGES, meta, *views)

        found = self.ssd.read_run(run, FRAME_BYTES, build, use=False)
        return None if found is None else (found[1], found[0].count)

    def pages_of(self, node_id: str, members: MemberList, portion: int) -> Iterator[list[bytes]]:
        """On a reader thread: keys of pages here that ``node_id`` owns under ``members``, in portions."""
        for keys in self.ssd.listing(portion):
            yield [key for key in keys if _owns(members, node_id, key)]

    async def window_from_peers(self, name: WindowName) -> tuple[bytes, bytes] | None:
        """(record, checksum) of a window record that is still at an earlier owner; kept here from now on."""
        found = await self.read_through.window(name, self._windows.config.max_record_bytes)
        if found is None:
            return None
        record, tenant = found
        checksum = record_checksum(record)
        if self._windows.promise(len(record)):
            self._windows.put(name, record, checksum, tenant=tenant)
        return record, checksum

    async def on_reader(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run something that may touch the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def _frames(self, keys: Sequence[bytes]) -> tuple[list[bytes], int]:
        frames: list[bytes] = []
        pages = 0
        for key in keys:  # one by one: the run may have holes here
            found = await self.on_reader(self.frame_for_peer, [key])
            if found is not None:
                frames.append(found[0])
                pages += 1
        return frames, pages

    # ---- purges ----

    async def purge(self, tenant: bytes, purged_ms: int) -> tuple[int, int, int]:
        """Forget everything of a tenant: (pages, bytes, window records) that went."""
        async with self._purging:
            if not self.purges.begin(tenant, purged_ms):
                return 0, 0, 0
            gone = await self._forget(tenant)
            self.purges.finish(tenant)
        self._counters.add("store_purges")
        log.info("purged a tenant: %d pages, %d bytes, %d window records", *gone)
        return gone

    async def learn_purges(self, message: store_peer_pb2.Purges) -> None:
        """Carry out purges that a peer knows and this node does not."""
        for tenant, purged_ms in list(self.purges.unknown(message)):
            await self.purge(tenant, purged_ms)

    async def _forget(self, tenant: bytes) -> tuple[int, int, int]:
        windows = self._windows.purge(tenant)
        keys, size = await self.on_reader(self.ssd.purge, tenant)
        self.replication.forget(keys)
        self._counters.observer.evicted("ssd", "purged", len(keys))
        return len(keys), size, windows + self._windows.purge(tenant)

    async def _meet_peers(self) -> None:
        mine = self.purges.to_proto()
        answers = await asyncio.gather(*(peer.exchange_purges(mine) for peer in self.peers.others()))
        for answer in answers:
            if answer is not None:
                await self.learn_purges(answer)

    async def _keep_meeting(self) -> None:
        epoch = -1
        while True:
            try:
                async with asyncio.timeout(self.config.purge_sync_s):
                    await self.feed.newer(epoch)
            except TimeoutError:
                pass
            epoch = self.feed.current.epoch
            self.ssd.tenants.share = self.feed.current.share(self.node_id) or 1.0
            await self._meet_peers()


def _node_id(config: PeerConfig, node_config: NodeConfig) -> str:
    if config.peers and not config.node_id:  # nodes of a fixed list are named by their addresses
        return config.advertise or f"{node_config.host}:{node_config.port}"
    return config.node_id or stored_node_id(node_config.ssd.directory)


def stored_node_id(directory: Path) -> str:
    """The name that stays with a directory; made on first use."""
    path = directory / "node-id"
    try:
        name = path.read_text("utf-8").strip()
        if 0 < len(name) <= MAX_NODE_ID:
            return name
    except FileNotFoundError:
        pass
    name = secrets.token_hex(8)
    path.write_text(name + "\n", "utf-8")
    return name


def _owns(members: MemberList, node_id: str, key: bytes) -> bool:
    owner = members.owner(run_of(key))
    return owner is not None and owner.node_id == node_id


def _feed(config: PeerConfig, node_config: NodeConfig) -> MemberFeed:
    if config.membership:
        return ServiceFeed(config.membership, tls=node_config.tls, first_list_s=1.0)
    if config.members_file is not None:
        return FileFeed(config.members_file)
    return MemberFeed.fixed(config.peers)
