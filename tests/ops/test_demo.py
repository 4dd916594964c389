"""The demonstration's own arithmetic; the whole of it runs in test_demo_run.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cedar.cluster.config_load import load_config
from cedar.model.chat import ChatOptions, ImagePart, Message
from cedar.model.prompt import PromptFormat
from cedar.ops import demo
from cedar.ops.exits import CommandError
from cedar.ops.generation import Reply
from cedar.v1 import common_pb2, generation_pb2
from rich.console import Console

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v41-tiny"
PICTURE = (GOLDEN / "image.png").read_bytes()


def opening() -> list[int]:
    prompts = PromptFormat.open(str(GOLDEN))
    asked = [
        Message(role="system", content=(demo.SYSTEM,)),
        Message(role="user", content=(ImagePart(PICTURE), demo.QUESTIONS[0])),
    ]
    return prompts.encode_chat(asked, ChatOptions(thinking=False)).ids


def test_second_turn_begins_with_the_first_and_its_answer() -> None:
    answer = [100, 200, 300]
    ids = demo.second_turn_ids(str(GOLDEN), PICTURE, answer)
    first = opening()
    assert ids[: len(first) + 3] == [*first, *answer]
    config = PromptFormat.open(str(GOLDEN)).config
    assert ids[len(first) + 3] == config.eos_token_id
    assert ids.count(config.image_token_id) == 1


def test_an_answer_that_ended_by_itself_has_one_end_token() -> None:
    config = PromptFormat.open(str(GOLDEN)).config
    ended = demo.second_turn_ids(str(GOLDEN), PICTURE, [100, 200, config.eos_token_id])
    assert ended == demo.second_turn_ids(str(GOLDEN), PICTURE, [100, 200])


def test_an_image_token_in_gibberish_announces_no_image() -> None:
    config = PromptFormat.open(str(GOLDEN)).config
    ids = demo.second_turn_ids(str(GOLDEN), PICTURE, [100, config.image_token_id, 200])
    assert ids == demo.second_turn_ids(str(GOLDEN), PICTURE, [100])


def test_the_table_has_a_column_a_turn() -> None:
    ends = []
    for turn in range(2):
        end = generation_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=24)
        end.sources.prompt_tokens = 70 + 40 * turn
        end.sources.state_restored = turn == 1
        end.traffic.pages_sent = 2
        end.traffic.page_bytes_sent = 6784
        ends.append(Reply(f"r{turn}", finished=end))
    model = generation_pb2.GetModelResponse(name="tiny", bytes_per_token=106, page_tokens=32, page_bytes=3392)
    screen = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.print(demo.report(demo.Outcome(model, tuple(ends), 12.0)))
    text = screen.export_text()
    screen.file.close()
    for words in (
        "106 bytes of packed KV a token",
        "turn 1",
        "turn 2",
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


def test_without_the_checkpoint_it_says_what_to_do(tmp_path: Path) -> None:
    config = load_config("local-cpu", [f"model.path={tmp_path}"])
    with pytest.raises(CommandError, match="make demo"):
        demo.read_picture(config, None)


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
