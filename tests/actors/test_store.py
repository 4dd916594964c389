"""Requests with a real store node: second turns, evicted state, damaged and absent stores."""

from __future__ import annotations

from typing import Any

import pytest
from cedar.model.state import SequenceState


def second_turn(single: Any, first: list[int], reply: list[int], more: list[int], count: int) -> list[int]:
    """The same conversation in one process, the state simply kept: what a restored record must equal."""
    network = single.network
    memory, seq = network.own_sequence(list(first), len(reply) + len(more) + count)
    assert single.run(memory, seq, len(reply)) == reply
    again = SequenceState(
        slot=0,
        pages=seq.pages,
        ids=[*first, *reply, *more],
        length=seq.length,
        encoder_start=seq.encoder_start,
        decoder_start=seq.decoder_start,
    )
    return single.run(memory, again, count)  # type: ignore[no-any-return]


async def test_a_second_turn_resumes_from_the_window_record(rig: Any, single: Any, prompt: Any) -> None:
    ids, more = prompt(20, 75), prompt(21, 40)
    async with rig(store=True, decodes=2) as cluster:
        first = await cluster.generate(cluster.request(ids, 7))
        assert first.end.state_stored
        assert first.done.traffic.pages_stored == 2
        assert (first.end.pages_sealed, first.end.pages_stored) == (0, 0)
        longer = [*ids, *first.ids, *more]
        found = await cluster.offer(longer)
        assert found["hit_pages"] == 2
        assert found["window"].tokens == 81
        reply = await cluster.generate(cluster.request(longer, 6, decode=1, **found), decode=1)
        sources = reply.sources
        assert sources.state_restored
        assert (sources.hit_local_tokens, sources.state_tokens, sources.computed_tokens) == (64, 17, 41)
        assert reply.ids == second_turn(single, ids, first.ids, more, 6)
        assert reply.encoder_start == 0
        # A third turn, from the record of the second, on a worker that has nothing in memory.
        cluster.prefill.parts.engine.pages.drop_cached()
        longest = [*longer, *reply.ids, *prompt(22, 9)]
        found = await cluster.offer(longest)
        third = await cluster.generate(cluster.request(longest, 3, **found))
        assert third.sources.state_restored
        assert third.sources.hit_store_tokens == found["hit_pages"] * 32
        assert third.done.traffic.pages_sealed > 0


async def test_without_its_window_record_a_hit_from_the_store_replays(
    rig: Any, single: Any, prompt: Any
) -> None:
    ids = prompt(23, 75)
    longer = [*ids, *prompt(24, 30)]
    async with rig(store=True) as cluster:
        await cluster.generate(cluster.request(ids, 2))
        cluster.prefill.parts.engine.pages.drop_cached()
        gone = cluster.window(longer, 74)
        reply = await cluster.generate(cluster.request(longer, 6, hit_pages=2, window=gone))
        sources = reply.sources
        assert not sources.state_restored
        assert (sources.hit_store_tokens, sources.computed_tokens, sources.replayed_tokens) == (64, 41, 16)
        assert reply.ids == single.replayed(longer, 2, 6)
        assert cluster.prefill.counters["store_windows_missed"] == 1


@pytest.mark.parametrize("share", [True, False])
async def test_pages_after_a_replay_are_shared_unless_the_config_isolates_them(
    rig: Any, single: Any, prompt: Any, share: bool
) -> None:
    ids = prompt(23, 75)
    longer = [*ids, *prompt(24, 80)]  # its decoding seals a page after five tokens
    settings = {"share_replayed_pages": share}
    async with rig(store=True, prefill=settings, decode=settings) as cluster:
        await cluster.generate(cluster.request(ids, 2))
        reply = await cluster.generate(cluster.request(longer, 8, hit_pages=2))
        assert reply.sources.replayed_tokens == 16
        assert reply.ids == single.replayed(longer, 2, 8)
        assert reply.done.traffic.pages_sealed == 2
        assert reply.end.pages_sealed == 1
        stored = reply.done.traffic.pages_stored, reply.end.pages_stored
        assert stored == ((2, 1) if share else (0, 0))
        # The same prompt again: the pages of the replay are hits, or they never were.
        again = await cluster.generate(cluster.request(longer, 1, hit_pages=4))
        hits = again.sources.hit_local_tokens + again.sources.hit_store_tokens
        assert hits == (128 if share else 64)
        if not share:
            assert again.ids == reply.ids[:1]


async def test_a_promise_that_the_store_does_not_keep_is_a_shorter_hit(
    rig: Any, single: Any, prompt: Any
) -> None:
    ids = prompt(23, 75)
    longer = [*ids, *prompt(24, 30)]
    async with rig(store=True) as cluster:
        await cluster.generate(cluster.request(ids, 2))
        cluster.prefill.parts.engine.pages.drop_cached()
        reply = await cluster.generate(cluster.request(longer, 6, hit_pages=3))
        assert reply.sources.hit_store_tokens == 64
        assert reply.ids == single.replayed(longer, 2, 6)
        other = prompt(25, 70)
        cold = await cluster.generate(cluster.request(other, 3, hit_pages=2))
        assert cold.sources.hit_store_tokens == 0
        assert cold.ids == single.cold(other, 3)


async def test_pages_sealed_while_decoding_reach_the_store(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(26, 60)
    async with rig(store=True) as cluster:
        first = await cluster.generate(cluster.request(ids, 8))
        assert (first.end.pages_sealed, first.end.pages_stored) == (1, 1)
        longer = [*ids, *first.ids, *prompt(27, 20)]
        found = await cluster.offer(longer)
        assert found["hit_pages"] == 2
        reply = await cluster.generate(cluster.request(longer, 3, hit_pages=2))
        # The second page came from Decode through the store: Prefill had only computed the first.
        assert (reply.sources.hit_local_tokens, reply.sources.hit_store_tokens) == (32, 32)


async def test_a_dead_store_is_only_a_miss(rig: Any, single: Any, prompt: Any) -> None:
    ids = prompt(28, 75)
    async with rig(store=True) as cluster:
        await cluster.store.stop(0)
        cluster.store = None
        window = cluster.window(ids, 70)
        reply = await cluster.generate(cluster.request(ids, 4, hit_pages=2, window=window))
        assert reply.ids == single.cold(ids, 4)
        assert reply.sources.computed_tokens == 75
        assert not reply.end.state_stored
        assert reply.done.traffic.pages_stored == 0


async def test_a_store_that_appears_later_is_used(rig: Any, prompt: Any) -> None:
    ids = prompt(28, 75)
    async with rig(store=True) as cluster:
        cluster.prefill.set_store(None)
        cluster.decode.set_store(None)
        first = await cluster.generate(cluster.request(ids, 2))
        assert not first.end.state_stored
        cluster.prefill.parts.engine.pages.drop_cached()
        cluster.prefill.set_store(cluster.store.address)
        cluster.decode.set_store(cluster.store.address)
        second = await cluster.generate(cluster.request(ids, 2))
        assert second.end.state_stored
        assert second.done.traffic.pages_stored == 2


@pytest.mark.parametrize("record_is_left", [True, False])
async def test_a_restored_request_resumes_elsewhere_with_the_same_tokens(
    rig: Any, single: Any, prompt: Any, record_is_left: bool
) -> None:
    ids, more = prompt(20, 75), prompt(21, 40)
    async with rig(store=True, decodes=2) as cluster:
        first = await cluster.generate(cluster.request(ids, 7))
        longer = [*ids, *first.ids, *more]
        found = await cluster.offer(longer)
        begun = await cluster.generate(cluster.request(longer, 2, **found))
        assert begun.sources.state_restored
        expected = second_turn(single, ids, first.ids, more, 6)
        assert begun.ids == expected[:2]
        if not record_is_left:
            cluster.store.windows.purge(cluster.tenant)
        again = cluster.request(
            [*longer, *begun.ids],
            6,
            decode=1,
            prompt_tokens=len(longer),
            encoder_start=begun.encoder_start,
            **found,
        )
        reply = await cluster.generate(again, decode=1, start=2)
        assert reply.sources.state_restored is record_is_left
        assert reply.ids == expected[2:]


async def test_a_window_record_that_does_not_fit_is_a_miss(rig: Any, single: Any, prompt: Any) -> None:
    ids, more = prompt(20, 75), prompt(21, 40)
    async with rig(store=True) as cluster:
        first = await cluster.generate(cluster.request(ids, 7))
        longer = [*ids, *first.ids, *more]
        found = await cluster.offer(longer)
        name = (found["window"].page_key, found["window"].tokens, found["window"].digest)
        record = await cluster.client.get_window(*name)
        damaged = record[:900] + bytes([record[900] ^ 1]) + record[901:]
        assert await cluster.client.put_window(*name, damaged)
        reply = await cluster.generate(cluster.request(longer, 4, **found))
        assert not reply.sources.state_restored
        assert reply.sources.replayed_tokens == 16
        assert cluster.prefill.counters["window_records_corrupt"] == 1
        assert reply.ids == single.replayed(longer, 2, 4)
