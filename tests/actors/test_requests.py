"""Requests through real workers: the tokens are those of the same network in one process."""

from __future__ import annotations

import asyncio
from typing import Any

from cedar.model.sampling import SamplingParams
from cedar.v1.common_pb2 import FinishReason


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
