"""Histories that were found by seeds, or thought of, written down: what went wrong in them once stays right.

Each plays on the whole simulated cluster and ends with everything that ``Simulation.quiet`` expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.peers import CopiedPage
from cedar.kvstore.placement import run_of
from cedar.kvstore.put import PutCounts
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.tenant_purge import PEER_SERVICE
from cedar.v1 import store_peer_pb2
from simulated_cluster import Simulation
from simulated_hosts import SERVICE, Host
from simulated_network import SimulatedTransport
from store_model import Purge, value

SEED = 2  # four nodes


class Story:
    """A simulation and shorthand for what scenarios do with it."""

    def __init__(self) -> None:
        self.simulation = Simulation(SEED, calm=True)
        self.tenant = self.simulation.model.tenants[0]
        self.chain = self.tenant.chains[0]

    def host(self, name: str) -> Host:
        return next(host for host in self.simulation.hosts if host.name == name)

    def owner(self, key: bytes) -> Host:
        return self.simulation._owner(key)

    async def put(self, keys: list[bytes] | None = None) -> PutCounts:
        """Write the chain (its first pages) through the first client."""
        await self.simulation.put(0, self.tenant, keys or self.chain, 0)
        return PutCounts()

    async def call(self, host: Host, method: str, request: Any, timeout_s: float) -> Any:
        """An operator's call to one node."""
        process = self.simulation.client_processes[0]
        channel = SimulatedTransport(self.simulation.network, process.name, process).open(f"{host.name}:1")
        return await getattr(ServiceStub(channel, PEER_SERVICE), method)(request, timeout=timeout_s)

    def ordered(self) -> None:
        """A purge of the tenant is ordered in a way that the simulation does not see."""
        now_s = self.simulation.loop.now_s
        self.tenant.version += 1
        self.simulation.model.purges.append(Purge(self.tenant, now_s, now_s))

    async def until(self, holds: Any, within_s: float = 60.0) -> None:
        deadline_s = self.simulation.loop.now_s + within_s
        while not holds():
            assert self.simulation.loop.now_s < deadline_s, "it did not happen in time"
            await asyncio.sleep(0.1)


def on(host: Host, keys: list[bytes]) -> int:
    return sum(key in host.disk.pages for key in keys)


def test_an_owner_without_room_gets_its_pages_once_there_is_room() -> None:
    """A copy that was refused three times was given up, and the page a miss for as long as it lived."""
    story = Story()

    async def script() -> None:
        owner = story.owner(story.chain[20])
        mine = [key for key in story.chain if story.owner(key) is owner]
        owner.disk.full = True
        story.simulation.network.sever("client0", owner.name)
        await story.put()
        taken = [key for key in mine if any(key in host.disk.pages for host in story.simulation.hosts)]
        assert taken, "the next holders have them"
        story.simulation.network.mend("client0", owner.name)
        await asyncio.sleep(90)
        assert on(owner, mine) == 0
        owner.disk.full = False
        await story.until(lambda: on(owner, taken) == len(taken))

    story.simulation.play(script)


def test_a_node_that_joins_without_room_is_not_settled_until_it_has_its_pages() -> None:
    """What it could not keep counted as moved; from then on nobody was asked for it."""
    story = Story()

    async def script() -> None:
        host = story.owner(story.chain[20])
        mine = [key for key in story.chain if story.owner(key) is host]
        host.kill()
        await story.until(lambda: story.simulation._members().find(host.name) is None)
        await asyncio.sleep(10)
        await story.put()
        host.disk.full = True
        await host.start()
        await asyncio.sleep(20)
        assert host.node is not None
        assert not host.node.part.rebalance.settled
        assert await story.simulation.read(0, story.chain) == len(story.chain), "read through meanwhile"
        host.disk.full = False
        await story.until(lambda: on(host, mine) == len(mine))

    story.simulation.play(script)


def test_a_member_that_goes_in_the_middle_of_a_fetch_ends_no_task() -> None:
    """Its channel is closed, which cancels the call; that ended the task that waited: rebalance, for good."""
    story = Story()

    async def script() -> None:
        await story.put()
        host = story.owner(story.chain[20])
        await asyncio.sleep(1)
        other = next(each for each in story.simulation.hosts if each is not host)
        other.kill()
        await story.until(lambda: story.simulation._members().find(other.name) is None)
        host.disk.slow = 500.0  # what others fetch from it takes a while
        await other.start()
        await asyncio.sleep(1.5)
        host.kill()
        await story.until(lambda: story.simulation._members().find(host.name) is None)
        await host.start()

    story.simulation.play(script)


def test_a_holder_that_forgot_the_list_does_not_number_another_one_like_it() -> None:
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        for _ in range(3):
            simulation.kill_service()
            gone = simulation.hosts[1]
            gone.kill()
            simulation.service_clock.step_s -= 86_400
            await simulation.start_service(forget=True)
            await asyncio.sleep(3)
            await gone.start()
            await asyncio.sleep(3)

    story.simulation.play(script)


def test_two_dead_nodes_of_three_are_dropped_in_the_end() -> None:
    """More than half at once may be this side's fault; for ever it is not, while one is heard."""
    story = Story()

    async def script() -> None:
        alive, *dead = story.simulation.hosts
        for host in dead:
            host.kill()
        await story.until(lambda: len(story.simulation._members().members) == 1)
        await story.put()
        assert on(alive, story.chain) == len(story.chain)

    story.simulation.play(script)


def test_a_purge_whose_caller_leaves_is_carried_out_all_the_same() -> None:
    """It counted as known from its beginning on, so nobody told the node again."""
    story = Story()

    async def script() -> None:
        await story.put()
        host = story.owner(story.chain[20])
        assert host.node is not None
        part = host.node.part
        tenant = story.tenant
        story.ordered()
        host.disk.slow = 1000.0
        request = store_peer_pb2.PurgeRequest(tenant=tenant.domain, purge_id=77)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE"):
            await story.call(host, "Purge", request, 0.05)
        host.disk.slow = 1.0
        await story.until(lambda: part.purges.carried_out(tenant.domain) == (77,))
        assert on(host, story.chain) == 0

    story.simulation.play(script)


def test_a_purge_after_the_clock_stepped_back_is_a_purge() -> None:
    """Purges were named by their time, and one that looked older than the last was taken for done."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        for _ in range(3):
            await story.put()
            simulation.client_clocks[0].step_s -= 3600
            await simulation.purge(0, story.tenant)
            assert sum(on(host, story.chain) for host in simulation.hosts) == 0

    story.simulation.play(script)


def test_a_purge_that_cannot_be_written_down_is_said_so() -> None:
    """A second try was answered "done", though the first had failed and a restart would know of neither."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        host = story.owner(story.chain[20])
        host.disk.full = True
        story.ordered()
        for _ in range(2):
            report = await simulation.clients[0].purge(story.tenant.domain)
            assert report.unreachable == (host.name,)
            assert on(host, story.chain) == 0, "it is carried out all the same"
        host.disk.full = False
        assert (await simulation.clients[0].purge(story.tenant.domain)).unreachable == ()

    story.simulation.play(script)


def test_a_node_that_does_not_know_of_a_purge_cannot_bring_pages_back_through_another() -> None:
    """Pages read through were checked before they were stored, and sent to the client unchecked."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        host = story.owner(story.chain[20])
        mine = [key for key in story.chain if story.owner(key) is host and key in story.chain[16:]]
        old = dict(host.disk.pages)
        host.kill()
        await story.until(lambda: simulation._members().find(host.name) is None)
        await simulation.purge(0, story.tenant)
        for other in simulation.hosts:
            if other is not host:
                simulation.network.sever(host.name, other.name)  # so it hears nobody's purges
                simulation.network.sever(other.name, host.name)
        host.disk.pages.update(old)
        await host.start()
        await asyncio.sleep(12)
        assert on(host, mine) == len(mine)
        receiver = next(other for other in simulation.hosts if other is not host)
        assert receiver.node is not None
        assert host.node is not None
        part = receiver.node.part
        frame = host.node.part.frame_for_peer(mine[:1])
        assert frame is not None
        page = CopiedPage(mine[0], memoryview(old[mine[0]].value), 0, story.tenant.domain, 0.0, ())
        assert not part.current(page)
        assert (await part.keep([page])).stored == 0
        simulation.network.heal()

    story.simulation.play(script)


def test_a_node_that_was_away_hears_of_purges_though_the_service_is_away_too() -> None:
    """Without a list it knew no peers to ask, and served what it had to clients whose list was frozen."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        host = story.owner(story.chain[20])
        await asyncio.sleep(1)
        host.kill()
        simulation.kill_service()
        await simulation.purge(0, story.tenant)
        await host.start()
        assert on(host, story.chain) == 0

    story.simulation.play(script)


def test_a_node_without_a_list_that_learns_of_a_purge_goes_on() -> None:
    """It was told to settle once more under no list at all, and asked itself for one without end."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        host = story.owner(story.chain[20])
        simulation.kill_service()
        host.kill()
        host.disk.texts.clear()
        await host.start()
        assert host.node is not None
        story.ordered()
        assert host.node.part.feed.current.epoch == 0
        told = store_peer_pb2.Purges(
            purges=[store_peer_pb2.PurgeRequest(tenant=story.tenant.domain, purge_id=5)]
        )
        await story.call(host, "ExchangePurges", told, 5.0)
        await asyncio.sleep(1)
        assert on(host, story.chain) == 0

    story.simulation.play(script)


def cut_from_the_service(story: Story) -> ClusterClient:
    """The first client, which from now on hears of new lists from nodes alone."""
    simulation = story.simulation
    simulation.isolated.add(0)
    simulation.network.sever(SERVICE, "client0")
    simulation.network.sever("client0", SERVICE)
    return simulation.clients[0]


async def look_up_until(story: Story, holds: Callable[[], bool], every_s: float) -> None:
    """The first client looks its chain up, again and again."""
    deadline_s = story.simulation.loop.now_s + 30
    while not holds():
        assert story.simulation.loop.now_s < deadline_s, "it never learns of the list"
        await story.simulation.clients[0].match(story.tenant.root, story.chain, tenant=story.tenant.domain)
        await asyncio.sleep(every_s)


def test_a_client_that_was_given_an_empty_list_finds_the_nodes_again() -> None:
    """It asked nobody from then on, so nobody could tell it; a purge told nobody, and named nobody."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        await asyncio.sleep(1)
        client = cut_from_the_service(story)
        last, *others = simulation.hosts
        for host in others:
            assert host.process is not None
            host.process.pause()
        await story.until(lambda: len(simulation._members().members) == 1)
        assert last.node is not None
        assert last.process is not None
        await last.process.spawn(last.node.stop(0.1))
        assert simulation._members().members == ()
        for host in others:
            assert host.process is not None
            host.process.resume()
        await look_up_until(story, lambda: not client.feed.current.members, 0.02)
        for host in others:
            simulation.network.sever("client0", host.name)
        await simulation.purge(0, story.tenant)
        assert "unreachable=('a', 'b', 'c', 'd')" in simulation.story[-1]
        for host in others:
            simulation.network.mend("client0", host.name)
        await look_up_until(story, lambda: client.feed.current == simulation._members(), 0.5)

    story.simulation.play(script)


def test_a_client_whose_list_names_only_dead_nodes_finds_the_others_again() -> None:
    """It asked the dead for as long as it lived, though nodes that it knew before were back."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        await asyncio.sleep(1)
        client = cut_from_the_service(story)
        last, *others = simulation.hosts
        for host in others:
            assert host.node is not None
            assert host.process is not None
            await host.process.spawn(host.node.stop(0.1))
        await look_up_until(story, lambda: len(client.feed.current.members) == 1, 0.1)
        for host in others:
            await host.start()
        last.kill()
        await story.until(lambda: len(simulation._members().members) == len(others))
        await story.until(lambda: simulation._members().find(last.name) is None)
        await look_up_until(story, lambda: client.feed.current == simulation._members(), 0.5)

    story.simulation.play(script)


def test_a_purge_while_a_copy_waits_for_room() -> None:
    """Whether a page was purged was asked once, and not again after the wait for room in the queue."""
    story = Story()

    async def script() -> None:
        host = story.owner(story.chain[20])
        assert host.node is not None
        assert host.process is not None
        part, pages = host.node.part, host.node.ssd
        key = story.chain[20]
        page = CopiedPage(key, memoryview(value(key, 0)), 20, story.tenant.domain, 0.0, ())
        host.disk.slow = 50.0
        filler = story.simulation.model.tenants[1].chains[1]
        await story.simulation.put(0, story.simulation.model.tenants[1], filler, 0)
        real_put = pages.put
        refused: list[int] = []

        def full(items: Any) -> Any:
            from cedar.kvstore.errors import Refused

            if not part.purges.of(story.tenant.domain):
                refused.append(1)
                raise Refused("queue", 0.01)
            return real_put(items)

        pages.put = full  # type: ignore[method-assign]
        keeping = host.process.spawn(part.keep([page]))
        await asyncio.sleep(0.1)
        host.disk.slow = 1.0
        await host.process.spawn(part.purging.purge(story.tenant.domain, 99))
        counts = await keeping
        pages.put = real_put  # type: ignore[method-assign]
        story.ordered()
        assert refused
        assert counts.stored == 0
        assert key not in host.disk.pages

    story.simulation.play(script)


def test_a_drain_goes_on_though_the_service_forgets() -> None:
    """Asked once, the holder that came back empty listed the node as active again, and it waited in vain."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        await story.put()
        host = story.owner(story.chain[20])
        assert host.node is not None
        assert host.process is not None
        simulation.network.sever(host.name, SERVICE)
        draining = host.process.spawn(host.node.drain(60.0))
        await asyncio.sleep(1)
        simulation.kill_service()
        simulation.network.mend(host.name, SERVICE)
        await simulation.start_service(forget=True)
        assert await draining
        others = [other for other in simulation.hosts if other is not host]
        assert all(any(key in other.disk.pages for other in others) for key in story.chain)
        await host.process.spawn(host.node.stop(0.1))
        assert await simulation.read(0, story.chain) == len(story.chain)

    story.simulation.play(script)


def test_moved_pages_keep_their_places_over_holes() -> None:
    """Pages that were not neighbours went into one frame, which numbered them as if they were."""
    story = Story()

    async def script() -> None:
        simulation = story.simulation
        host = story.owner(story.chain[20])
        host.kill()
        await story.until(lambda: simulation._members().find(host.name) is None)
        await asyncio.sleep(10)
        await story.put()
        mine = [key for key in story.chain if run_of(key) == run_of(story.chain[20])]
        for other in simulation.hosts:
            for key in mine[1::3]:
                if other.disk.pages.pop(key, None) is not None:
                    simulation.model.lost[key] = simulation.loop.now_s
        await host.start()
        await story.until(lambda: on(host, mine) == len(mine) - len(mine[1::3]))
        for key in mine:
            if key in host.disk.pages:
                assert host.disk.pages[key].page_index == story.chain.index(key)

    story.simulation.play(script)
