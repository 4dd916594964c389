"""Streams that lose their Decode worker again and again, on every way a prompt can be computed.

Each case runs twice on fresh workers, undisturbed and with two deaths: tokens and log-probabilities agree.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cedar.actors.decode_worker import DecodeWorker
from cedar.actors.errors import Corrupt
from cedar.cluster.client import GenerationClient as Client
from cedar.cluster.worker_configs import decode_config
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import (
    HOST,
    IMAGE,
    Stack,
    collect,
    finished_of,
    idle,
    local_config,
    network,
    running,
    tokens_of,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

COUNT = 22
Ids = list[int]
Prepare = Callable[[Stack, Client], Awaitable[pb.GenerateRequest]]


def prompt(length: int, image_at: int | None = None) -> pb.GenerateRequest:
    """``length`` ids, after images are expanded."""
    ids = [5 + (i * 37 + length) % 600 for i in range(length)]
    images: list[bytes] = []
    if image_at is not None:
        prepared = network().prepare(IMAGE)
        del ids[: prepared.plan.span_length]
        ids.insert(image_at, network().config.image_token_id)
        images = [IMAGE]
    return with_ids(ids, images)


def with_ids(ids: Ids, images: list[bytes], **sampling: Any) -> pb.GenerateRequest:
    asked = common.SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=3, logprobs=2, **sampling)
    return pb.GenerateRequest(token_ids=common.TokenIds(ids=ids), images=images, sampling=asked)


def cold(length: int, image_at: int | None = None) -> Prepare:
    async def prepare(stack: Stack, client: Client) -> pb.GenerateRequest:
        return prompt(length, image_at)

    return prepare


def held_by_prefill(length: int, image_at: int | None = None) -> Prepare:
    async def prepare(stack: Stack, client: Client) -> pb.GenerateRequest:
        request = prompt(length, image_at)
        await collect(client, request)
        forget_windows(stack)
        return request

    return prepare


def held_by_the_store(length: int, image_at: int | None = None) -> Prepare:
    async def prepare(stack: Stack, client: Client) -> pb.GenerateRequest:
        request = await held_by_prefill(length, image_at)(stack, client)
        await idle(stack)
        for prefill in stack.prefills:
            assert prefill.parts is not None
            prefill.parts.engine.pages.drop_cached()
        for decode in stack.decode:
            decode.pages.drop_cached()
        return request

    return prepare


def second_turn(length: int, more: int, image_at: int | None = None) -> Prepare:
    """Goes on from the window record of a first turn."""

    async def prepare(stack: Stack, client: Client) -> pb.GenerateRequest:
        first = prompt(length, image_at)
        reply = tokens_of(await collect(client, first))
        await idle(stack)
        ids = [*first.token_ids.ids, *reply[:-1], *range(9, 9 + more)]
        return with_ids(ids, list(first.images))

    return prepare


def forget_windows(stack: Stack) -> None:
    tier = stack.store.windows
    for name in list(tier._held):
        tier.delete(name)


async def start_decode(stack: Stack) -> None:
    worker = DecodeWorker(decode_config(stack.config, HOST), network=stack.network)
    stack.decode.append(worker)
    await stack.start_worker(worker)


async def answer(
    prepare: Prepare,
    folder: Path,
    deaths: tuple[int, ...],
    temperature: float = 1.1,
    *,
    forget: bool = False,
    drafting: bool = False,
) -> tuple[list[Any], pb.Finished, common.PromptSources]:
    """Tokens with their log-probabilities; a Decode worker dies after each number of tokens in ``deaths``,
    and the store's window state with it if so asked."""
    config = local_config(f"decode.drafting={drafting}")
    async with running(config, folder) as stack, Client(stack.address, "key-a") as client:
        request = await prepare(stack, client)
        request.sampling.temperature = temperature
        await start_decode(stack)
        seen: list[pb.GenerateResponse] = []
        async for response in client.generate(request):
            seen.append(response)
            if response.HasField("delta") and len(tokens_of(seen)) in deaths:
                if forget:
                    forget_windows(stack)
                await stack.kill_decoding()
        await idle(stack)
        events = [r.delta.token for r in seen if r.HasField("delta") and r.delta.HasField("token")]
        told = [(e.index, e.id, e.logprob, [(t.id, t.logprob) for t in e.top]) for e in events]
        return told, finished_of(seen), seen[0].started.sources


@pytest.mark.parametrize(
    ("prepare", "temperature", "drafting"),
    [
        pytest.param(cold(64, 20), 1.1, False, id="cold, behind an image, ends on a page"),
        pytest.param(cold(9), 0.0, True, id="cold, shorter than the window, drafting"),
        pytest.param(held_by_prefill(64), 1.1, False, id="in Prefill, wholly"),
        pytest.param(held_by_the_store(120, 60), 1.1, False, id="in the store, replayed inside an image"),
        pytest.param(second_turn(43, 3), 1.1, False, id="from a record at a page's end"),
        pytest.param(second_turn(120, 40, 20), 1.1, True, id="from a record behind an image, drafting"),
    ],
)
async def test_two_deaths_change_nothing(
    prepare: Prepare, temperature: float, drafting: bool, tmp_path: Path
) -> None:
    """Nor does drafting, which goes on when the stream is resumed."""
    expected, end, sources = await answer(prepare, tmp_path / "a", (), temperature)
    assert (len(expected), end.retries) == (COUNT, 0)
    told, end, again = await answer(prepare, tmp_path / "b", (5, 14), temperature, drafting=drafting)
    assert again == sources, "both went the same way"
    assert told == expected
    assert end.retries >= 2


@pytest.mark.parametrize("more", [4, 40])
async def test_nor_does_losing_the_record_that_it_went_on_from(more: int, tmp_path: Path) -> None:
    expected, _, sources = await answer(second_turn(70, more), tmp_path / "a", ())
    assert sources.state_restored
    told, end, again = await answer(second_turn(70, more), tmp_path / "b", (12,), forget=True)
    assert (again, end.retries) == (sources, 1)
    assert told == expected


async def test_a_prefill_worker_that_fails_a_resumed_stream_is_the_one_to_avoid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(local_config(), tmp_path) as stack, Client(stack.address, "key-a") as client:
        await stack.add_prefill()
        await start_decode(stack)
        failed: list[Any] = []

        def once(real: Any) -> Any:
            async def finish(*facts: Any) -> Any:
                if not failed:
                    failed.append(real)
                    raise Corrupt("the network gave nonsense")
                return await real(*facts)

            return finish

        seen: list[pb.GenerateResponse] = []
        async for response in client.generate(prompt(70)):
            seen.append(response)
            if len(tokens_of(seen)) == 5 and len(stack.decode) == 3:
                for prefill in stack.prefills:
                    assert prefill.parts is not None
                    engine = prefill.parts.engine
                    monkeypatch.setattr(engine, "finish", once(engine.finish))
                await stack.kill_decoding()
        assert len(failed) == 1
        assert (len(tokens_of(seen)), finished_of(seen).retries) == (COUNT, 2)
        suspected = {address for address, _ in stack.directory.state.view().suspected}
        assert not suspected & {worker.address for worker in stack.decode}, "they did nothing wrong"
        await idle(stack)
