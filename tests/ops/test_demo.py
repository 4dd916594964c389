"""The demonstration's own arithmetic; the whole of it runs in test_demo_run.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cedar.cluster.config_load import load_config
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from cedar.ops import demo
from cedar.ops.exits import CommandError
from cedar.ops.generation import Reply
from cedar.training.tokenization import WordEncoder
from cedar.v1 import common_pb2, generation_pb2
from rich.console import Console


def test_questions_are_made_of_the_seed_and_the_text_is_long() -> None:
    config = load_config(demo.PRESET, demo.OVERRIDES)
    asked = demo.questions(config, None, 7)
    assert asked == demo.questions(config, None, 7)
    assert asked != demo.questions(config, None, 8)
    picture, text, turn = asked
    assert picture.image is not None
    assert picture.image.startswith(b"\x89PNG")
    assert [question.follows for question in asked] == [False, False, True]
    measure = WordEncoder(Tokenizer.load(Storage(config.model.path)).backend).measure
    assert measure(text.text) >= 1024
    for question in (text, turn):
        assert question.answer is not None
        assert question.answer in text.text, "the fact is hidden there"
    assert len(demo.shortened(text)) < 400


def test_of_the_users_own_picture_nobody_knows_the_answer() -> None:
    own = demo.questions(load_config(demo.PRESET), b"bytes", 7)[0]
    assert (own.image, own.answer) == (b"bytes", None)
    assert demo.Answered(own, Reply("r", text="a cat")).right is None
    assert "no right answer" in demo.judged(demo.Answered(own, Reply("r")))


def test_right_and_wrong() -> None:
    question = demo.Question("a text", "Who?", "It is Ada.")
    right, wrong = (demo.Answered(question, Reply("r", text=text)) for text in ("It is Ada.", "It is Bob."))
    assert (right.right, wrong.right) == (True, False)
    assert demo.judged(right) == "right"
    assert demo.judged(wrong) == "wrong, the right answer is: It is Ada."
    outcome = demo.Outcome(generation_pb2.GetModelResponse(), (right, wrong), 1.0)
    assert demo.verdict(outcome) == "1 of 2 answers are right"


def test_the_table_has_a_column_a_question() -> None:
    ends = []
    for turn in range(2):
        end = generation_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=24)
        end.sources.prompt_tokens = 70 + 40 * turn
        end.sources.state_restored = turn == 1
        end.traffic.pages_sent = 2
        end.traffic.page_bytes_sent = 6784
        ends.append(
            demo.Answered(demo.Question(f"number {turn}", "?", None), Reply(f"r{turn}", finished=end))
        )
    model = generation_pb2.GetModelResponse(name="tiny", bytes_per_token=106, page_tokens=32, page_bytes=3392)
    screen = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.print(demo.report(demo.Outcome(model, tuple(ends), 12.0)))
    text = screen.export_text()
    screen.file.close()
    for words in (
        "106 bytes of packed KV a token",
        "number 0",
        "number 1",
        "restored from DRAM",
        "2 (6.6 KiB)",
        "110",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("restored", "replayed", "words"),
    [(True, 0, "restored"), (False, 16, "16 tokens replayed"), (False, 0, "computed")],
)
def test_window_state_in_words(restored: bool, replayed: int, words: str) -> None:
    end = generation_pb2.Finished()
    end.sources.state_restored = restored
    end.sources.replayed_tokens = replayed
    assert words in demo.window_state(end)


def test_without_the_model_it_says_so(tmp_path: Path) -> None:
    config = load_config("local-cpu", [f"model.path={tmp_path}"])
    with pytest.raises(CommandError, match="installation is incomplete"):
        demo.questions(config, None, 7)


def test_overrides_ask_for_the_cluster_that_is_promised() -> None:
    config = load_config(demo.PRESET, demo.OVERRIDES)
    minimum = [config.stage(name).autoscaling.min for name in ("encoder", "prefill", "decode")]
    assert minimum == [1, 1, 2]
    assert config.store.nodes == 1
    assert config.gateway.port == 0


def test_a_second_signal_does_not_cut_the_cleaning_short() -> None:
    with demo.interrupt_on_sigterm():
        with demo.interrupts_ignored():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
