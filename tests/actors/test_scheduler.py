"""Where a prefill starts, and that its tokens always add up."""

from __future__ import annotations

import pytest
from cedar.actors import scheduler
from cedar.actors.errors import BooksError
from cedar.actors.scheduler import HitPlan, Model, Prefix
from cedar.v1.common_pb2 import FinishReason
from hypothesis import given
from hypothesis import strategies as st

M = Model(page_tokens=32, window=16, encoder_layers=6, context=512, eos=1)


def plan(total: int, **what: int | None) -> HitPlan:
    values = {"local": 0, "promised": 0, "record": None, "first_start": None} | what
    return scheduler.plan_hits(M, total, **values)  # type: ignore[arg-type]


def settle(total: int, arrived: int, **what: int | None) -> Prefix:
    given_plan = HitPlan(int(what.pop("local", 0) or 0), arrived, what.get("record") is not None)
    prompt = int(what.pop("prompt", total) or total)
    values = {"record": None} | what
    decoder_from = scheduler.decoder_start(M, prompt, record=None)
    return scheduler.settle(M, total, decoder_from, given_plan, arrived=arrived, **values)  # type: ignore[arg-type]


class TestPlan:
    def test_nothing_is_cold(self) -> None:
        assert plan(100) == HitPlan(0, 0, False)

    def test_local_pages_come_before_the_stores(self) -> None:
        assert plan(200, local=2, promised=5) == HitPlan(2, 3, False)
        assert plan(200, local=5, promised=2) == HitPlan(5, 0, False)

    def test_no_more_than_the_prompts_full_pages(self) -> None:
        assert plan(100, promised=9) == HitPlan(0, 3, False)

    def test_a_record_is_taken_when_a_replay_would_run_more(self) -> None:
        assert plan(200, promised=5, record=150) == HitPlan(0, 4, True)
        assert plan(200, promised=4, record=112) == HitPlan(0, 3, True)
        assert plan(200, promised=4, record=111) == HitPlan(0, 4, False)

    def test_a_record_beyond_the_pages_or_the_prompt_is_not(self) -> None:
        assert plan(200, promised=3, record=150) == HitPlan(0, 3, False)
        assert plan(200, promised=6, record=200) == HitPlan(0, 6, False)

    def test_a_record_inside_the_first_page_needs_no_page(self) -> None:
        assert plan(60, record=20) == HitPlan(0, 0, True)

    def test_a_resumed_stream_takes_the_record_it_began_with(self) -> None:
        assert plan(200, promised=6, record=40, first_start=0) == HitPlan(0, 1, True)


class TestSettle:
    def test_hits_replay_one_window(self) -> None:
        assert settle(200, 5) == Prefix(0, 5, 144, 144)

    def test_hits_within_the_window_are_cold(self) -> None:
        wide = Model(page_tokens=16, window=16, encoder_layers=6, context=512, eos=1)
        got = scheduler.settle(wide, 100, 84, HitPlan(1, 0, False), arrived=1, record=None)
        assert got == Prefix(0, 0, 0, 0)

    def test_a_whole_prompt_of_hits_still_runs_its_last_window(self) -> None:
        assert settle(160, 5) == Prefix(0, 5, 144, 144)

    def test_a_record_continues_exactly(self) -> None:
        got = settle(200, 4, record=150)
        assert got == Prefix(0, 4, 150, 0, restored=True)
        assert not got.after_replay

    def test_a_record_whose_pages_did_not_arrive_is_not_used(self) -> None:
        assert settle(200, 3, record=150) == Prefix(0, 3, 80, 80)

    def test_what_follows_a_replay_is_marked(self) -> None:
        assert settle(200, 4, record=150, record_origin=48).after_replay
        assert settle(200, 5).after_replay

    def test_resuming_a_cold_start_runs_ahead_until_the_bound_is_not_felt(self) -> None:
        got = settle(420, 12, prompt=400, first_start=0)
        # Kept from min(384 hits, 400 - 16) on; 6 layers of 16 before that, down to a page's start.
        assert got == Prefix(0, 12, 288, 0)
        assert got.start + M.encoder_layers * M.window <= min(384, 400 - 16)
        assert not got.after_replay

    def test_resuming_a_replay_starts_where_it_started(self) -> None:
        assert settle(420, 12, prompt=400, first_start=304) == Prefix(0, 12, 304, 304)
        assert settle(420, 12, prompt=400, first_start=48) == Prefix(0, 12, 288, 48)

    def test_resuming_without_the_record_goes_back_to_where_its_decoder_began(self) -> None:
        begins = scheduler.decoder_start(M, 160, record=150, record_start=48)
        assert begins == 48, "fewer than 16 tokens were added: the record's rings are read"
        got = scheduler.settle(M, 170, begins, HitPlan(0, 5, False), arrived=5, record=None, first_start=0)
        assert got == Prefix(0, 5, 0, 0)
        assert scheduler.decoder_start(M, 166, record=150, record_start=48) == 150
        assert scheduler.decoder_start(M, 9, record=None) == 0

    def test_resuming_with_fewer_hits_than_before_comes_out_cold(self) -> None:
        assert settle(420, 5, prompt=400, first_start=304) == Prefix(0, 5, 64, 0)


@given(
    total=st.integers(1, 511),
    local=st.integers(0, 20),
    promised=st.integers(0, 20),
    arrived=st.integers(0, 20),
    record=st.none() | st.integers(1, 600),
    got_record=st.booleans(),
    generated=st.integers(0, 100),
    first_start=st.integers(0, 300),
)
def test_tokens_always_add_up(
    total: int,
    local: int,
    promised: int,
    arrived: int,
    record: int | None,
    got_record: bool,
    generated: int,
    first_start: int,
) -> None:
    resumed = 0 < generated < total
    first = first_start if resumed else None
    prompt = total - generated if resumed else total
    planned = plan(total, local=local, promised=promised, record=record, first_start=first)
    reached = min(max(arrived, planned.local), planned.pages)
    got = scheduler.settle(
        M, total, scheduler.decoder_start(M, prompt, record=None), planned,
        arrived=reached, record=record if planned.record and got_record else None, first_start=first,
    )  # fmt: skip
    sources = scheduler.sources(M, total, got)
    assert (
        sources.prompt_tokens
        == total
        == (
            sources.hit_local_tokens
            + sources.hit_store_tokens
            + sources.state_tokens
            + sources.computed_tokens
        )
    )
    assert 0 <= got.start < total
    assert got.pages <= reached
    assert got.start <= got.pages * M.page_tokens or got.restored
    if resumed and not got.restored:
        assert got.start <= max(0, prompt - M.window), "the decoder's span must be run"


def test_a_sum_that_does_not_add_up_is_a_bug() -> None:
    with pytest.raises(BooksError, match="do not add up"):
        scheduler.sources(M, 10, Prefix(0, 2, 48, 48))


def test_chunks_end_on_multiples_so_that_pages_seal_early() -> None:
    position, ends = 20, []
    while position < 200:
        position = scheduler.chunk_end(position, 200, 64)
        ends.append(position)
    assert ends == [64, 128, 192, 200]


@pytest.mark.parametrize(
    ("length", "generated", "max_tokens", "positions"),
    [(10, 0, 1, 10), (10, 0, 5, 14), (15, 5, 8, 17), (510, 0, 100, 512), (10, 3, 3, 10)],
)
def test_room_for_everything_a_request_may_run(
    length: int, generated: int, max_tokens: int, positions: int
) -> None:
    assert scheduler.decode_positions(length, generated, max_tokens, 512) == positions


@pytest.mark.parametrize(
    ("token", "index", "position", "ignore_eos", "reason"),
    [
        (5, 0, 20, False, None),
        (1, 0, 20, False, FinishReason.FINISH_REASON_STOP),
        (1, 0, 20, True, None),
        (7, 0, 20, True, FinishReason.FINISH_REASON_STOP),
        (5, 9, 20, False, FinishReason.FINISH_REASON_LENGTH),
        (5, 0, 511, False, FinishReason.FINISH_REASON_LENGTH),
    ],
)
def test_a_stream_ends(
    token: int, index: int, position: int, ignore_eos: bool, reason: FinishReason | None
) -> None:
    got = scheduler.finish_reason(
        token, index=index, position=position, max_tokens=10, stop_ids=(7,), ignore_eos=ignore_eos, model=M
    )
    assert got == reason
