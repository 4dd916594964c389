"""What makes a store node one of several: its name, the member list, and the work in the background.

``StoreNode`` owns one of these when it is configured with peers. It joins the membership, settles under each
list (``rebalance``), copies what is hit often (``replication``), finds what has not arrived yet
(``read_through``), and carries out purges.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import NodeConfig
from cedar.kvstore.environment import Environment
from cedar.kvstore.errors import Refused, StoreClosed
from cedar.kvstore.frames import FRAME_BYTES, record_checksum
from cedar.kvstore.member_feed import FileFeed, MemberFeed, ServiceFeed
from cedar.kvstore.members import MemberList
from cedar.kvstore.membership_agent import MembershipAgent
from cedar.kvstore.node_memory import LastList, NodeName
from cedar.kvstore.page_store import PageStore
from cedar.kvstore.page_wire import PagesFrame
from cedar.kvstore.peers import CopiedPage, CopiedWindow, Peers
from cedar.kvstore.placement import run_of
from cedar.kvstore.purge_work import Gone, PurgeWork
from cedar.kvstore.purges import Purges
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.read_through import ReadThrough
from cedar.kvstore.rebalance import Rebalance
from cedar.kvstore.replication import Replication
from cedar.kvstore.rpc import transport_options
from cedar.kvstore.stats import Counters
from cedar.kvstore.window_tier import WindowName, WindowTier

log = logging.getLogger(__name__)
_KEEP_POLL_S = 0.01


class ClusterPart:
    """One node's part in a cluster; event loop only, except where said."""

    def __init__(
        self,
        node_config: NodeConfig,
        config: PeerConfig,
        *,
        environment: Environment,
        ssd: PageStore,
        windows: WindowTier,
        readers: Executor,
        counters: Counters,
        feed: MemberFeed | None = None,
    ) -> None:
        self.node_config = node_config
        self.config = config
        self.ssd = ssd
        self._transport = environment.transport
        directory = node_config.ssd.directory
        self._name: NodeName | None = None
        self.node_id = config.node_id or _address_in_fixed_list(config, node_config)
        if not self.node_id:
            self._name = NodeName(environment.state_file(directory / "node-id"), environment.rng)
            self.node_id = self._name.name
        self.incarnation = environment.rng.getrandbits(62) | 1
        self._windows = windows
        self._readers = readers
        self._counters = counters
        self.feed = feed or _feed(config, environment)
        self.purges = Purges(environment.state_file(directory / "purges.json"))
        self._last_list = LastList(environment.state_file(directory / "last-list.json"))
        options = transport_options(
            max_message_bytes=node_config.max_message_bytes,
            keepalive_s=node_config.keepalive_s,
            keepalive_timeout_s=node_config.keepalive_timeout_s,
        )
        self.peers = Peers(
            self.node_id, self.feed, config, environment.transport, options.channel, counters.add
        )
        self.rebalance = Rebalance(
            self.node_id, self.feed, self.peers, config, held=ssd.held, keep=self.keep, count=counters.add
        )
        self.replication = Replication(
            self.node_id,
            self.feed,
            self.peers,
            config,
            frame=self._frame,
            count=counters.add,
            now_s=environment.clock.monotonic_s,
        )
        self.read_through = ReadThrough(
            self.node_id,
            self.feed,
            self.peers,
            self.rebalance,
            self.replication,
            keep=self.keep,
            current=self.current,
            lost=ssd.lost,
            count=counters.add,
        )
        self._agent: MembershipAgent | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.purging = PurgeWork(
            self.purges,
            self.peers,
            forget=self._forget,
            look_again=self.rebalance.look_again,
            count=counters.add,
            retry_s=config.retry_s,
        )

    # ---- life ----

    async def prepare(self) -> None:
        """Before the node serves: follow the list, finish purges, learn those that were missed."""
        if isinstance(self.feed, ServiceFeed) and (known := self._last_list.load()) is not None:
            self.feed.publish(known)
        await self.feed.start()
        await self.purging.finish()
        await self.purging.meet()

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
                transport=self._transport,
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
        """Hand over: no more writes come here, and the others take what they now own; whether they have."""
        if self._agent is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                if not await self._agent.drain(timeout_s):
                    return False
                while self.replication.waiting:  # what clients put here for others meanwhile
                    await asyncio.sleep(_KEEP_POLL_S)
        except TimeoutError:
            return False
        return True

    @property
    def listed(self) -> bool:
        """Whether a membership service lists this node."""
        return self._agent is not None and self.feed.current.find(self.node_id) is not None

    @property
    def unsettled(self) -> int:
        """While draining: how many nodes have not yet received what is theirs."""
        return 0 if self._agent is None else self._agent.unsettled

    async def leave(self) -> None:
        """Leave the list; calls under way go on."""
        if self._agent is not None:
            await self._agent.stop()

    async def stop(self) -> None:
        """End the work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.purging.stop()
        await self.read_through.close()
        await self.peers.close()
        await self.feed.stop()

    # ---- pages between nodes ----

    def current(self, copied: CopiedPage | CopiedWindow) -> bool:
        """Whether its sender knew every purge of its tenant that is known here."""
        return self.purges.covered(copied.tenant, copied.purges)

    async def keep(self, pages: Sequence[CopiedPage]) -> PutCounts:
        """Store pages that another node had, with the age they have there.

        Those that were purged meanwhile are left out of the counts; refused are those there was no room for.
        """
        give_up_s = asyncio.get_running_loop().time() + self.node_config.put_wait_s
        while True:
            now_s = self.ssd.now_s()
            items = [
                PutItem(p.key, p.value, p.page_index, p.tenant, used_s=now_s - p.idle_s)
                for p in pages
                if self.current(p)  # asked anew after each pause: a purge may have come
            ]
            if not items:
                break
            try:
                counts = await asyncio.wrap_future(self.ssd.put(items))
                break
            except StoreClosed:
                return PutCounts(refused=len(items), reason="closed")
            except Refused as error:
                if asyncio.get_running_loop().time() >= give_up_s:
                    return PutCounts(refused=len(items), reason=error.reason)
                await asyncio.sleep(_KEEP_POLL_S)
        if len(items) < len(pages):
            self._counters.add("store_copies_refused_purged", len(pages) - len(items))
        return counts if items else PutCounts()

    def frame_for_peer(self, keys: Sequence[bytes]) -> tuple[bytes, int] | None:
        """On a reader thread: a frame of leading pages of one run, with what is known of them.

        It speaks of all its pages at once, so it ends before a page of another tenant, or of another place
        than the one before it says.
        """
        facts = self.ssd.facts(keys[0])
        if facts is None:
            return None
        page_index, tenant, idle_s = facts
        # Before the pages are read: a purge that comes meanwhile is not known to what was read.
        purges = self.purges.carried_out(tenant)
        run = [keys[0]]
        for key in keys[1:]:
            following = self.ssd.facts(key) if run_of(key) == run_of(keys[0]) else None
            if following is None or following[:2] != (page_index + len(run), tenant):
                break
            idle_s = min(idle_s, following[2])
            run.append(key)

        frame = PagesFrame(
            run, first_page=page_index, tenant=tenant, idle_s=max(int(idle_s), 0), purges=purges
        )
        found = self.ssd.read_into(run, FRAME_BYTES, frame.place, use=False)
        return None if found is None else (frame.message(found.count), found.count)

    def pages_of(self, node_id: str, members: MemberList, portion: int) -> Iterator[list[bytes]]:
        """On a reader thread: keys of pages here that ``node_id`` owns under ``members``, in portions."""
        for keys in self.ssd.listing(portion):
            yield [key for key in keys if _owns(members, node_id, key)]

    async def window_from_peers(self, name: WindowName) -> tuple[bytes, bytes] | None:
        """(record, checksum) of a window record that is still at an earlier owner; kept here from now on."""
        found = await self.read_through.window(name, self._windows.config.max_record_bytes)
        if found is None:
            return None
        checksum = record_checksum(found.record)
        if self._windows.promise(len(found.record)):
            self._windows.put(name, found.record, checksum, tenant=found.tenant)
        return found.record, checksum

    async def on_reader(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run something that may touch the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def _frame(self, key: bytes) -> bytes | None:
        found = await self.on_reader(self.frame_for_peer, [key])
        return None if found is None else found[0]

    # ---- purges ----

    async def _forget(self, tenant: bytes) -> Gone:
        windows = self._windows.purge(tenant)
        self.read_through.forget(tenant)
        keys, size = await self.on_reader(self.ssd.purge, tenant)
        self.replication.forget(keys)
        self._counters.observer.evicted("ssd", "purged", len(keys))
        return len(keys), size, windows + self._windows.purge(tenant)

    async def _keep_meeting(self) -> None:
        epoch = -1
        while True:
            try:
                async with asyncio.timeout(self.config.purge_sync_s):
                    await self.feed.newer(epoch)
            except TimeoutError:
                pass
            members = self.feed.current
            epoch = members.epoch
            self.ssd.tenants.share = members.share(self.node_id) or 1.0
            try:
                if self._name is not None:
                    self._name.write()
                if isinstance(self.feed, ServiceFeed):
                    self._last_list.note(members)
                await self.purging.finish()
                await self.purging.meet()
            except Exception:  # the next round tries again
                log.exception("purges were not exchanged")


def _address_in_fixed_list(config: PeerConfig, node_config: NodeConfig) -> str:
    """Nodes of a fixed list are named by their addresses; "" for others."""
    if not config.peers:
        return ""
    return config.advertise or f"{node_config.host}:{node_config.port}"


def _owns(members: MemberList, node_id: str, key: bytes) -> bool:
    owner = members.owner(run_of(key))
    return owner is not None and owner.node_id == node_id


def _feed(config: PeerConfig, environment: Environment) -> MemberFeed:
    if config.membership:
        return ServiceFeed(config.membership, transport=environment.transport, first_list_s=1.0)
    if config.members_file is not None:
        return FileFeed(config.members_file)
    return MemberFeed.fixed(config.peers)
