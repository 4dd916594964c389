import asyncio
from typing import Any

import pytest
from cedar.cluster.active import ActiveRequests
from cedar.cluster.config_load import parse_config
from cedar.cluster.ending import ended
from cedar.cluster.errors import CallerError
from cedar.cluster.hits import Hit, first_computed, images_needed, pack_ids, pages_needed, resumed_hit
from cedar.cluster.limits import admitted_sampling, check_images, limits_of
from cedar.cluster.usage import Account, add_traffic, prompt_tokens_balance
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as generation
from cedar.v1 import stages_pb2 as stages

CONFIG = parse_config(
    {
        "model": {"path": "/m"},
        "gateway": {
            "max_prompt_tokens": 100,
            "max_images": 2,
            "max_image_bytes": 10,
            "max_output_tokens": 50,
            "default_output_tokens": 20,
        },
        "prefill": {"pages": 10},
        "decode": {"pages": 12},
    }
)
LIMITS = limits_of(CONFIG, context_tokens=120, page_tokens=10)


@pytest.mark.parametrize(
    ("prompt", "asked", "expected"),
    [(5, 0, 20), (5, 50, 50), (90, 50, 30), (100, 0, 20)],
)
def test_max_tokens_is_as_asked_within_the_context(prompt: int, asked: int, expected: int) -> None:
    sampling = admitted_sampling(prompt, common.SamplingParams(max_tokens=asked, seed=7), LIMITS)
    assert (sampling.max_tokens, sampling.seed) == (expected, 7)


@pytest.mark.parametrize(
    ("prompt", "asked", "said"),
    [
        (101, 0, "prompt: 101 tokens (at most 100 tokens)"),
        (5, 51, "sampling.max_tokens: 51 (at most 50)"),
    ],
)
def test_too_much_is_named(prompt: int, asked: int, said: str) -> None:
    with pytest.raises(CallerError) as caught:
        admitted_sampling(prompt, common.SamplingParams(max_tokens=asked), LIMITS)
    assert str(caught.value) == said


def test_what_no_worker_could_hold_is_refused_at_once() -> None:
    small = limits_of(
        CONFIG.model_copy(update={"decode": CONFIG.decode.model_copy(update={"pages": 3})}), 120, 10
    )
    with pytest.raises(
        CallerError, match=r"sampling\.max_tokens: 20 \(with a prompt of 20 tokens 4 pages; decode.pages: 3\)"
    ):
        admitted_sampling(20, common.SamplingParams(), small)
    small = limits_of(
        CONFIG.model_copy(update={"prefill": CONFIG.prefill.model_copy(update={"pages": 3})}), 120, 10
    )
    with pytest.raises(CallerError, match=r"prompt: 31 tokens \(prefill.pages: 3 hold fewer\)"):
        admitted_sampling(31, common.SamplingParams(), small)


def test_images_are_counted_and_weighed_before_they_are_decoded() -> None:
    with pytest.raises(CallerError, match=r"images: 3 \(at most 2\)"):
        check_images(generation.GenerateRequest(text="x", images=[b"1"] * 3), LIMITS)
    with pytest.raises(CallerError, match=r"images\[1\]: 11 bytes \(at most 10 bytes\)"):
        check_images(generation.GenerateRequest(text="x", images=[b"1", b"1" * 11]), LIMITS)
    message = generation.Message(role="user", content=[{"text": "x"}, {"image": b"1" * 11}])
    request = generation.GenerateRequest(conversation=generation.Conversation(messages=[message]))
    with pytest.raises(CallerError, match=r"conversation\.messages\[0\]\.content\[1\]\.image: 11 bytes"):
        check_images(request, LIMITS)


def test_only_images_that_will_be_read_are_encoded() -> None:
    images = [common.ImageSpan(start=0, length=20), common.ImageSpan(start=40, length=20)]
    cold, pages = Hit(), Hit(pages=3)
    window = Hit(pages=3, window=stages.WindowRef(tokens=60))
    assert first_computed(cold, 10, 16) == 0
    assert first_computed(pages, 10, 16) == 14
    assert first_computed(Hit(pages=1), 10, 16) == 0
    assert first_computed(window, 10, 16) == 60
    assert images_needed(images, 0) == images
    assert images_needed(images, 14) == images
    assert images_needed(images, 20) == images[1:]
    assert images_needed(images, 60) == []


def test_a_resumed_stream_names_the_hit_as_it_went() -> None:
    hit = Hit(3, stages.WindowRef(tokens=35))
    assert resumed_hit(hit, state_restored=True) == hit
    assert resumed_hit(hit, state_restored=False) == Hit(3)


def test_arithmetic() -> None:
    assert pages_needed(10, 0, 10) == 1
    assert pages_needed(10, 1, 10) == 2
    assert pack_ids([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])


def test_accounts_add_up() -> None:
    account = Account(arrived_s=10.0)
    assert account.admitted(common.PromptSources(prompt_tokens=5, computed_tokens=5))
    assert not account.admitted(common.PromptSources(prompt_tokens=5, hit_store_tokens=5)), "counted once"
    account.first_token(10.5)
    account.first_token(99.0)
    account.encoded(2, 0.25)
    for _ in range(2):
        traffic = common.Traffic(pages_hit=3, pages_sent=4, page_bytes_sent=100)
        account.prefilled(stages.PrefillDone(traffic=traffic, compute_s=1.0, handoff_s=0.5, queue_s=0.1))
    account.decoded(stages.StreamEnd(pages_sealed=1, pages_stored=2, decode_s=3.0))
    assert account.sources is not None
    assert prompt_tokens_balance(account.sources)
    assert account.traffic == common.Traffic(
        pages_hit=3, pages_sent=8, page_bytes_sent=200, pages_sealed=1, pages_stored=2, images_encoded=2
    )
    assert (account.times.ttft_s, account.times.prefill_s, account.times.encoder_s) == (0.5, 2.0, 0.25)
    total = common.Traffic()
    add_traffic(total, account.traffic)
    assert total == account.traffic


@pytest.mark.parametrize(
    ("generated", "sampling", "reason"),
    [
        ([], {}, None),
        ([5, 6], {}, None),
        ([5, 1], {}, common.FINISH_REASON_STOP),
        ([5, 1], {"ignore_eos": True}, None),
        ([5, 9], {"stop_ids": [9]}, common.FINISH_REASON_STOP),
        ([5, 9], {"stop_ids": [5]}, None),
        ([5, 6, 7], {}, common.FINISH_REASON_LENGTH),
        ([5, 6, 1], {}, common.FINISH_REASON_STOP),
    ],
)
def test_a_whole_answer_is_not_resumed(
    generated: list[int], sampling: dict[str, Any], reason: int | None
) -> None:
    assert ended(generated, common.SamplingParams(max_tokens=3, **sampling), end_token=1) == reason


async def test_a_request_cancelled_before_it_runs_never_does() -> None:
    active = ActiveRequests()
    ran = []

    async def serve() -> None:
        ran.append(1)

    with active.entered("a", "id") as key:
        assert await active.cancel("a", "id")
        task = asyncio.create_task(serve())
        active.running(key, task)
        await asyncio.wait({task})
    assert task.cancelled()
    assert ran == []


async def test_request_ids_belong_to_their_tenant() -> None:
    active = ActiveRequests()
    with active.entered("a", "id") as key, active.entered("b", "id"), active.entered("a", "") as made:
        assert key == ("a", "id")
        assert made[1]
        with pytest.raises(CallerError, match="request_id: id"), active.entered("a", "id"):
            pass
        assert not await active.cancel("c", "id")
        assert await active.cancel("a", "id")
    assert len(active) == 0
    for bad in ("a#1", "x" * 129, "a\nb"):
        with pytest.raises(CallerError, match="request_id"), active.entered("a", bad):
            pass
