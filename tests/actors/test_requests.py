"""Requests through real workers: the tokens are those of the same network in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cedar.model import load_network
from cedar.model.sampling import SamplingParams
from cedar.v1 import stages_pb2
from cedar.v1.common_pb2 import FinishReason

GOLDEN = Path(__file__).parent.parent / "golden" / "v41-tiny"


async def test_cold_request_and_its_counts(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(1, 107)
    async with rig() as cluster:
        reply = await cluster.generate(cluster.request(ids, 8))
        assert reply.ids == single.cold(ids, 8)
        assert [token.index for token in reply.tokens] == list(range(8))
        assert reply.end.reason == FinishReason.FINISH_REASON_LENGTH
        assert reply.end.tokens == 8
        sources = reply.sources
        assert (sources.prompt_tokens, sources.computed_tokens, sources.replayed_tokens) == (107, 107, 0)
        traffic = reply.done.traffic
        assert (traffic.pages_hit, traffic.pages_sealed, traffic.pages_sent) == (0, 3, 3)
        value = cluster.network.layout.page_bytes + 96
        assert traffic.page_bytes_sent == 3 * value
        assert traffic.state_bytes_sent > 0
        await cluster.idle()
        assert cluster.decode.counters["pages_received"] == 3
        assert cluster.decode.status().pages_cached == 3
        assert cluster.prefill.status().pages_cached == 3


async def test_two_at_once_are_batched_and_equal_each_alone(rig: Any, single: Any, prompt: Any) -> None:
    first, second = prompt(2, 70), prompt(3, 41)
    drawn = SamplingParams(temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    async with rig() as cluster:
        wire = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
        one, two = await asyncio.gather(
            cluster.generate(cluster.request(first, 12)),
            cluster.generate(cluster.request(second, 12, sampling=wire)),
        )
        assert one.ids == single.cold(first, 12)
        assert two.ids == single.cold(second, 12, drawn)
        assert cluster.decode.status().counters["largest_batch"] == 2


async def test_a_prefix_hit_replays_and_equals_the_replay_of_one_process(
    rig: Any, single: Any, prompt: Any
) -> None:
    ids = prompt(4, 75)
    longer = [*ids, *prompt(5, 30)]
    async with rig() as cluster:
        await cluster.generate(cluster.request(ids, 1))
        reply = await cluster.generate(cluster.request(longer, 6))
        sources = reply.sources
        assert (sources.hit_local_tokens, sources.computed_tokens, sources.replayed_tokens) == (64, 41, 16)
        assert not sources.state_restored
        assert reply.encoder_start == 48
        assert reply.ids == single.replayed(longer, 2, 6)
        traffic = reply.done.traffic
        assert (traffic.pages_hit, traffic.pages_sealed, traffic.pages_sent) == (2, 1, 1)
        assert cluster.decode.counters["pages_shared"] == 2


async def test_hits_that_decode_lacks_are_sent_first(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(4, 75)
    longer = [*ids, *prompt(5, 30)]
    async with rig(decodes=2) as cluster:
        await cluster.generate(cluster.request(ids, 1))
        reply = await cluster.generate(cluster.request(longer, 6, decode=1), decode=1)
        assert reply.ids == single.replayed(longer, 2, 6)
        assert (reply.done.traffic.pages_hit, reply.done.traffic.pages_sent) == (2, 3)


async def test_a_whole_prompt_of_hits(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(6, 96)
    async with rig() as cluster:
        await cluster.generate(cluster.request(ids, 1))
        reply = await cluster.generate(cluster.request(ids, 4))
        assert (reply.sources.hit_local_tokens, reply.sources.computed_tokens) == (96, 0)
        assert reply.ids == single.replayed(ids, 3, 4)
        assert reply.done.traffic.pages_sealed == 0


async def test_a_dead_decode_worker_is_a_pause_with_the_same_tokens(
    rig: Any, single: Any, prompt: Any
) -> None:
    ids = prompt(7, 107)
    expected = single.cold(ids, 30)
    async with rig(decodes=2, check_idle=False) as cluster:
        request = cluster.request(ids, 30)
        seen: list[int] = []
        admitted = None
        async for event in cluster.prefill_events(request):
            admitted = admitted or event.admitted
        stream = cluster.stub(cluster.decode.address, "Decode").Stream(
            stages_pb2.StreamRequest(request_id=request.request_id), timeout=60
        )
        async for answer in stream:
            seen.append(answer.token.id)
            if len(seen) == 24:
                break
        stream.cancel()
        await cluster.decode.stop(0)
        again = cluster.request(
            [*ids, *seen],
            30,
            decode=1,
            prompt_tokens=len(ids),
            encoder_start=admitted.encoder_start,
        )
        reply = await cluster.generate(again, decode=1, start=len(seen))
        assert seen + reply.ids == expected
        assert [token.index for token in reply.tokens] == list(range(24, 30))
        # The pages that Prefill still had were hits; it ran ahead far enough to come out exactly as before.
        sources = reply.sources
        assert (sources.hit_local_tokens, sources.computed_tokens) == (96, 35)
        assert reply.encoder_start == 0
        cluster.prefill.assert_idle()
        await cluster.idle()


async def test_resuming_a_replayed_request_gives_its_tokens_again(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(4, 75)
    longer = [*ids, *prompt(5, 30)]
    expected = single.replayed(longer, 2, 10)
    async with rig(decodes=2) as cluster:
        await cluster.generate(cluster.request(ids, 1))
        first = await cluster.generate(cluster.request(longer, 4))
        assert first.ids == expected[:4]
        again = cluster.request(
            [*longer, *first.ids],
            10,
            decode=1,
            prompt_tokens=len(longer),
            encoder_start=first.encoder_start,
        )
        reply = await cluster.generate(again, decode=1, start=4)
        assert reply.ids == expected[4:]
        assert reply.encoder_start == first.encoder_start == 48


async def test_pages_sealed_while_decoding_are_hits_of_the_next_turn(
    rig: Any, single: Any, prompt: Any
) -> None:
    ids = prompt(8, 60)
    async with rig() as cluster:
        reply = await cluster.generate(cluster.request(ids, 8))
        assert reply.end.pages_sealed == 1
        assert cluster.decode.status().pages_cached == 2
        longer = [*ids, *reply.ids, *prompt(9, 10)]
        second = await cluster.generate(cluster.request(longer, 3))
        # Prefill had one page (a cached one), Decode had both.
        assert second.sources.hit_local_tokens == 32
        assert second.done.traffic.pages_sent == 0


async def test_a_page_that_is_shared_is_never_written_when_its_hit_comes_to_nothing(
    rig: Any, single: Any, prompt: Any
) -> None:
    """Pages as short as the window: one hit alone is of no use, so its positions are computed again."""
    network = load_network(str(GOLDEN), page_tokens=16)
    ids = prompt(12, 20)
    longer = [*ids, *prompt(13, 30)]
    async with rig(other=network) as cluster:
        await cluster.generate(cluster.request(ids, 1))
        pages = cluster.prefill.parts.engine.pages
        (held,) = (lease.ref for lease in pages.reserve([cluster.keys(ids)[0]]))
        before = cluster.prefill.parts.engine.memory.pages.read(held.slot)
        reply = await cluster.generate(cluster.request(longer, 4, hit_pages=2))
        assert (reply.sources.hit_local_tokens, reply.sources.computed_tokens) == (0, 50)
        assert reply.ids == type(single)(network).cold(longer, 4)
        assert cluster.prefill.parts.engine.memory.pages.read(held.slot) == before
        pages.check(held)
        pages.release([held])
