"""A store of two nodes behind the stages: hits from both, a node that dies, a tenant that is purged."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from cedar.actors.prompts import PromptTools
from cedar.cluster import remote
from cedar.cluster.client import GenerationClient as Client
from cedar.cluster.config_print import effective_yaml
from cedar.cluster.state_file import ClusterState, WorkerEntry
from cedar.cluster.store_membership import StoreMembership
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.connect import connect
from cedar.kvstore.keys import tenant_domain
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .certificates import write_certificate
from .in_process import HOST, Stack, collect, finished_of, idle, local_config, running, tokens_of
from .single_process import SingleProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
SHORT_LEASE = "store.lease_s=1"
STORY = " ".join(f"Sentence {number} of a story that fills page after page." for number in range(12))
LONG = "1: " + STORY


def ask(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=common.SamplingParams(max_tokens=TOKENS, ignore_eos=True))


async def tokens(client: Client, text: str) -> tuple[list[int], pb.Finished]:
    answers = await collect(client, ask(text))
    return tokens_of(answers), finished_of(answers)


@pytest_asyncio.fixture(loop_scope="module")
async def two(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running(local_config("store.nodes=2", SHORT_LEASE), tmp_path) as stack:
        yield stack
        await idle(stack)


async def spread(stack: Stack, client: Client) -> tuple[str, list[int], pb.Finished]:
    """A prompt with pages on both nodes, and its answer. Nodes are named at random, so a few are tried."""
    for number in range(9):
        before = [node.ssd.stats()["store_pages"] for node in stack.stores]
        text = f"{number}: {STORY}"
        answer, end = await tokens(client, text)
        now = [node.ssd.stats()["store_pages"] for node in stack.stores]
        if all(now > was for now, was in zip(now, before, strict=True)):
            return text, answer, end
    raise AssertionError("all runs of all prompts are on one node")


Oracle = Callable[..., list[int]]


@pytest.fixture(scope="module")
def oracle(single: SingleProcess, tools: PromptTools) -> Oracle:
    """The plain network's answer, with the hit that a request had; without ``sources``: from nothing."""

    def answer(text: str, sources: common.PromptSources | None = None) -> list[int]:
        prompt = tools.prepare(ask(text))
        hit = 0 if sources is None else sources.hit_local_tokens + sources.hit_store_tokens
        assert sources is None or not sources.state_restored
        return single.replayed(prompt, hit, TOKENS) if hit else single.cold(prompt, TOKENS)

    return answer


@pytest_asyncio.fixture(loop_scope="module")
async def client(two: Stack) -> AsyncIterator[Client]:
    async with Client(two.address, api_key="key-a") as client:
        yield client


def drop_local(stack: Stack) -> None:
    """Pages come from the store or from nowhere."""
    for worker in stack.prefills:
        worker.parts.engine.pages.drop_cached()


async def test_one_prompt_hits_pages_on_both_nodes(two: Stack, client: Client, oracle: Oracle) -> None:
    text, cold, first = await spread(two, client)
    assert cold == oracle(text)
    assert first.traffic.pages_stored == first.traffic.pages_sealed > 4
    drop_local(two)
    before = [node.counters["store_pages_read"] for node in two.stores]
    warm, second = await tokens(client, text)
    assert warm == oracle(text, second.sources)
    assert second.sources.hit_store_tokens == second.sources.prompt_tokens // 32 * 32
    read = [node.counters["store_pages_read"] - was for node, was in zip(two.stores, before, strict=True)]
    assert all(read), read


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_dead_node_costs_time_and_no_answer(
    two: Stack, client: Client, oracle: Oracle, victim: int
) -> None:
    text, cold, _ = await spread(two, client)
    assert cold == oracle(text)
    drop_local(two)
    await two.kill_store(victim)
    again, end = await tokens(client, text)
    assert (again, end.retries) == (oracle(text, end.sources), 0)
    assert end.sources.hit_store_tokens < end.sources.prompt_tokens // 32 * 32
    # The list drops it after its lease, and what was lost is stored again on the node that is left.
    (left,) = two.stores
    while len(left.part.feed.current.members) > 1:
        await asyncio.sleep(0.05)
    for _ in range(2):
        drop_local(two)
        _, end = await tokens(client, text)
    assert end.sources.hit_store_tokens == end.sources.prompt_tokens // 32 * 32
    # It comes back, with the data that it had and under its old name.
    two.stores.append(await two.start_store(victim))
    await two.stores_listed()
    assert two.stores[-1].ssd.stats()["store_pages"] > 0
    other = "And now something else. " + STORY
    assert (await tokens(client, other))[0] == oracle(other)


async def test_losing_the_list_freezes_it_and_it_comes_back_at_its_place(
    two: Stack, client: Client, oracle: Oracle
) -> None:
    await tokens(client, LONG)
    target = two.membership.target
    await two.membership.stop()
    drop_local(two)
    again, end = await tokens(client, LONG)
    assert again == oracle(LONG, end.sources)
    assert end.sources.hit_store_tokens > 0
    _, end = await tokens(client, "Written while nobody keeps the list. " + STORY)
    assert end.traffic.pages_stored == end.traffic.pages_sealed > 4
    await two.membership.start()
    assert two.membership.target == target
    await asyncio.sleep(1.5)  # over a lease: the nodes have renewed it
    assert [len(node.part.feed.current.members) for node in two.stores] == [2, 2]


async def test_a_purge_takes_a_tenants_pages_and_window_records_from_every_node(two: Stack) -> None:
    async with Client(two.address, "key-a") as one, Client(two.address, "key-b") as other:
        cold, first = await tokens(one, LONG)
        await tokens(other, LONG)

    def records() -> float:
        return sum(node.windows.stats()["store_window_records"] for node in two.stores)

    assert records() == 2
    client = connect(two.membership.target)
    assert isinstance(client, ClusterClient)
    report = await client.purge(tenant_domain(b"t" * 32, "a"))
    await client.close()
    assert report.unreachable == ()
    assert report.windows == 1
    assert report.pages >= first.traffic.pages_stored
    assert records() == 1, "the other tenant's is still there"
    drop_local(two)
    async with Client(two.address, "key-a") as one, Client(two.address, "key-b") as other:
        again, end = await tokens(one, LONG)
        assert again == cold  # cold, too
        assert end.sources.computed_tokens == end.sources.prompt_tokens
        drop_local(two)
        assert (await tokens(other, LONG))[1].sources.hit_store_tokens > 0


async def test_a_list_that_cannot_be_read_is_left_aside(tmp_path: Path) -> None:
    config = local_config("store.nodes=2")
    (tmp_path / "members.json").write_text("{")
    (tmp_path / "membership.port").write_text("what?")
    membership = StoreMembership(config, str(tmp_path), HOST)
    await membership.start()
    assert membership.target.startswith("membership://127.0.0.1:")
    second = StoreMembership(config, str(tmp_path), HOST)  # the port is taken: another one is found
    await second.start()
    assert second.target not in ("", membership.target)
    await membership.stop()
    await second.stop()


@pytest.mark.parametrize("nodes", [1, 2])
async def test_certificates_are_shown_by_everyone(tmp_path: Path, oracle: Oracle, nodes: int) -> None:
    certificates = write_certificate(tmp_path)
    overrides = [f"store.tls.{field}={path}" for field, path in certificates.items()]
    config = local_config(f"store.nodes={nodes}", *overrides)
    async with running(config, tmp_path) as stack, Client(stack.address, "key-a") as client:
        assert (await tokens(client, LONG))[0] == oracle(LONG)
        drop_local(stack)
        again, end = await tokens(client, LONG)
        assert again == oracle(LONG, end.sources)
        assert end.sources.hit_store_tokens == end.sources.prompt_tokens // 32 * 32
        entries = tuple(WorkerEntry("store", node.address, 1, 1) for node in stack.stores)
        state = ClusterState("x", stack.address, 1, 1, 0.0, "", effective_yaml(config), entries)
        found = await asyncio.to_thread(remote.status, state)
        assert [report.error for report in found.workers] == [""] * nodes
        (tmp_path / "key_file").unlink()
        found = await asyncio.to_thread(remote.status, state)
        assert "No such file" in found.workers[0].error
        blind = connect(stack.directory.state.view().store_target or "")
        assert (await blind.match(bytes(32), [bytes(32)])).pages == 0
        assert not await blind.put_window(bytes(32), 1, bytes(32), b"record")
        await blind.close()
