"""Images through Encoder, Prefill and Decode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.actors.encoder_worker import FeatureCache, FeatureKey, Features
from cedar.model.images import PlannedImage
from cedar.model.prompt import PromptLimits, build_prompt
from cedar.v1.stages_pb2 import EncodeRequest, FeatureSource, FeaturesRequest

IMAGE = (Path(__file__).parent.parent / "golden" / "v41-tiny" / "image.png").read_bytes()


def with_image(network: Any, before: list[int], after: list[int]) -> Any:
    """(ids, spans, features) of a prompt with the golden image in the middle."""
    prepared = network.prepare(IMAGE)
    planned = PlannedImage(plan=prepared.plan, content_hash=prepared.content_hash)
    limits = PromptLimits.of(network.config)
    built = build_prompt([*before, network.config.image_token_id, *after], [planned], limits)
    return built.ids, built.images, {prepared.content_hash: network.encode_image(prepared)}


@pytest.fixture(scope="session")
def pictured(network: Any, prompt: Any) -> Any:
    return with_image(network, prompt(30, 30), prompt(31, 25))


async def test_a_prompt_with_an_image(rig: Any, single: Any, pictured: Any) -> None:
    ids, spans, features = pictured
    async with rig(encoder=True) as cluster:
        source = await cluster.encode(IMAGE)
        reply = await cluster.generate(cluster.request(ids, 5, images=spans, features=[source]))
        assert reply.ids == single.cold(ids, 5, images=spans, features=features)
        assert (
            reply.done.traffic.feature_bytes_sent == spans[0].length * cluster.network.config.hidden_size * 2
        )
        # With the image inside hit pages its features are not fetched again.
        pages = spans[0].end // 32 + 1
        assert len(ids) >= pages * 32
        again = await cluster.generate(cluster.request(ids, 2, images=spans))
        assert again.sources.hit_local_tokens == len(ids) // 32 * 32
        assert again.done.traffic.feature_bytes_sent == 0


async def test_workers_that_each_load_their_own_part_of_the_checkpoint(
    rig: Any, single: Any, pictured: Any
) -> None:
    ids, spans, features = pictured
    async with rig(encoder=True, own_networks=True) as cluster:
        source = await cluster.encode(IMAGE)
        reply = await cluster.generate(cluster.request(ids, 5, images=spans, features=[source]))
        assert reply.ids == single.cold(ids, 5, images=spans, features=features)


async def test_a_replay_inside_an_image_and_a_turn_after_it(
    rig: Any, single: Any, network: Any, prompt: Any
) -> None:
    ids, spans, features = with_image(network, prompt(30, 40), prompt(31, 25))
    cut = 64
    assert spans[0].start < cut - 16 < spans[0].end, "the replay begins inside the image"
    async with rig(encoder=True, store=True) as cluster:
        source = await cluster.encode(IMAGE)
        await cluster.generate(cluster.request(ids, 1, images=spans, features=[source]))
        engine = cluster.prefill.parts.engine
        engine.pages.drop_cached()
        hits = cut // 32
        wire = cluster.request(ids, 5, images=spans, features=[source], hit_pages=hits)
        reply = await cluster.generate(wire)
        assert (reply.sources.hit_store_tokens, reply.sources.replayed_tokens) == (cut, 16)
        assert reply.ids == single.replayed(ids, hits, 5, spans, features)
        # The next turn resumes behind the image, and needs no features.
        longer = [*ids, *reply.ids, *prompt(32, 20)]
        found = await cluster.offer(longer, spans)
        second = await cluster.generate(cluster.request(longer, 3, images=spans, **found))
        assert second.sources.state_restored
        assert second.done.traffic.feature_bytes_sent == 0
        assert second.encoder_start == cut - 16, "what follows a replay is known to"


async def test_equal_images_are_encoded_once_also_at_the_same_time(rig: Any) -> None:
    async with rig(encoder=True) as cluster:
        await asyncio.gather(*(cluster.encode(IMAGE) for _ in range(4)))
        assert cluster.encoder.counters["images_encoded"] == 1
        stub = cluster.stub(cluster.encoder.address, "Encode")
        content_hash = cluster.network.prepare(IMAGE).content_hash
        request = EncodeRequest(image=IMAGE, content_hash=content_hash, tenant=cluster.tenant)
        answer = await stub.Encode(request, timeout=10)
        assert answer.cached
        assert (answer.rows * (answer.columns + 1) + 2) * 128 * 2 == answer.feature_bytes


async def test_tenants_do_not_learn_of_each_others_images(rig: Any) -> None:
    async with rig(encoder=True) as cluster:
        stub = cluster.stub(cluster.encoder.address, "Encode")
        content_hash = cluster.network.prepare(IMAGE).content_hash

        async def cached(tenant: bytes) -> bool:
            request = EncodeRequest(image=IMAGE, content_hash=content_hash, tenant=tenant)
            return bool((await stub.Encode(request, timeout=10)).cached)

        assert [await cached(tenant) for tenant in (b"a", b"a", b"b")] == [False, True, False]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.GetFeatures(
                FeaturesRequest(content_hash=content_hash, tenant=b"c"), timeout=10
            ):
                pass
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("image", "content_hash", "words"),
    [
        (b"not an image", b"\x01" * 32, "image"),
        (IMAGE[:200], b"\x01" * 32, "image"),
        (IMAGE, b"\x01" * 32, "content_hash"),
        (IMAGE, b"short", "32 bytes"),
    ],
)
async def test_bad_images_are_the_callers_fault(
    rig: Any, image: bytes, content_hash: bytes, words: str
) -> None:
    async with rig(encoder=True) as cluster:
        stub = cluster.stub(cluster.encoder.address, "Encode")
        with pytest.raises(grpc.aio.AioRpcError, match=words) as failure:
            await stub.Encode(EncodeRequest(image=image, content_hash=content_hash), timeout=10)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_features_that_are_gone_are_said_to_be(rig: Any, pictured: Any) -> None:
    ids, spans, _ = pictured
    async with rig(encoder=True) as cluster:
        stub = cluster.stub(cluster.encoder.address, "Encode")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.GetFeatures(FeaturesRequest(content_hash=spans[0].content_hash), timeout=10):
                pass
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND
        source = FeatureSource(content_hash=spans[0].content_hash, encoder_address=cluster.encoder.address)
        for named in ([source], []):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await cluster.generate(cluster.request(ids, 5, images=spans, features=named))
            assert failure.value.code() is grpc.StatusCode.NOT_FOUND
            assert dict(failure.value.trailing_metadata())["cedar-stage"] == "encoder"
        await cluster.idle()


async def test_an_encoder_that_is_not_there_is_unavailable_in_time(rig: Any, pictured: Any) -> None:
    ids, spans, _ = pictured
    async with rig(prefill={"features_timeout_s": 0.5}) as cluster:
        gone = FeatureSource(content_hash=spans[0].content_hash, encoder_address="127.0.0.1:1")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await cluster.generate(cluster.request(ids, 5, images=spans, features=[gone]))
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(failure.value.trailing_metadata())["cedar-stage"] == "encoder"


def test_the_feature_cache_keeps_to_its_bytes_and_its_time() -> None:
    now = [0.0]
    cache = FeatureCache(100, 10.0, lambda: now[0])

    def features(size: int) -> Features:
        return Features(bytes(size), 1, size // 2, 1, 1)

    a, b, c, huge = (FeatureKey(b"tenant", name) for name in (b"a", b"b", b"c", b"huge"))
    for key in (a, b, c):
        cache.put(key, features(40))
    assert cache.get(a) is None, "the oldest went"
    assert cache.bytes == 80
    cache.put(huge, features(101))
    assert cache.get(huge) is None
    assert len(cache) == 2
    now[0] = 6.0
    assert cache.get(b) is not None
    now[0] = 11.0
    assert cache.get(c) is None, "not used for ten seconds"
    assert cache.get(b) is not None
    assert cache.bytes == 40
