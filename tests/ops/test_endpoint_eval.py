"""Questions to an endpoint: what goes over the wire, what counts as right, what is measured. The whole of it
runs against a real cluster in test_serve_run.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from cedar.cluster.client import GenerationClient
from cedar.ops import cli
from cedar.ops.endpoint_eval import Outcome, as_table, percentile, put_questions, request_of, summaries
from cedar.ops.exits import CommandError, Exit
from cedar.training import image_tasks
from cedar.training.cases import Case
from cedar.training.image_tasks import figure_turn
from cedar.training.text_tasks import Turn, sum_turn
from cedar.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from rich.console import Console

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class Gateway(generation_pb2_grpc.GenerationServicer):
    """Answers by question, as told."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, Any]] = {}
        self.keys: set[str] = set()
        self.now = self.most = 0

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.keys |= {value for key, value in context.invocation_metadata() if key == "authorization"}
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            text, end = self.answers[request.conversation.messages[-1].content[-1].text]
            if isinstance(end, grpc.StatusCode):
                await context.abort(end, text)
            for index, word in enumerate(text.split(" ")):
                delta = generation_pb2.Delta(
                    token=common_pb2.TokenEvent(index=index), text=" " * (index > 0) + word
                )
                yield generation_pb2.GenerateResponse(delta=delta)
            finished = generation_pb2.Finished(reason=end)
            finished.sources.prompt_tokens, finished.sources.hit_local_tokens = 40, 32
            yield generation_pb2.GenerateResponse(finished=finished)
        finally:
            self.now -= 1


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[tuple[Gateway, str]]:
    gateway, server = Gateway(), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield gateway, f"127.0.0.1:{port}"
    await server.stop(0)


def case(question: str, answer: str = "It is so.") -> Case:
    return Case("task", [Turn("task", question, answer)])


async def ask(address: str, cases: list[Case], concurrency: int = 1, key: str | None = None) -> list[Outcome]:
    async with GenerationClient(address, key) as client:
        return await put_questions(client, cases, concurrency=concurrency)


async def test_only_the_whole_answer_that_the_model_ended_is_right(endpoint: tuple[Gateway, str]) -> None:
    gateway, address = endpoint
    gateway.answers = {
        "right": ("It is so.", STOP),
        "longer": ("It is so. Yes", STOP),
        "cut": ("It is so.", LENGTH),
        "busy": ("come back later", grpc.StatusCode.RESOURCE_EXHAUSTED),
        "failed": ("It is so.", common_pb2.FINISH_REASON_FAILED),
    }
    outcomes = await ask(address, [case(name) for name in gateway.answers], key="k1")
    assert [outcome.right for outcome in outcomes] == [True, False, False, False, False]
    assert [bool(outcome.error) for outcome in outcomes] == [False, False, False, True, True]
    assert outcomes[3].error == "RESOURCE_EXHAUSTED: come back later"
    assert (len(outcomes[0].gaps_s), len(outcomes[1].gaps_s)) == (2, 3)
    assert outcomes[0].first_s > 0
    assert (outcomes[0].prompt_tokens, outcomes[0].cached_tokens) == (40, 32)
    assert gateway.keys == {"Bearer k1"}
    (of_task, of_all) = summaries(outcomes)
    record = of_task.record()
    assert (record["right"], record["asked"], record["failed"]) == (1, 5, 2)
    assert {**record, "task": "all"} == of_all.record()


@pytest.mark.parametrize(
    ("status", "code"),
    [(grpc.StatusCode.UNAUTHENTICATED, Exit.USAGE), (grpc.StatusCode.UNAVAILABLE, Exit.UNREACHABLE)],
)
async def test_what_no_question_can_escape_ends_it(
    endpoint: tuple[Gateway, str], status: grpc.StatusCode, code: Exit
) -> None:
    gateway, address = endpoint
    gateway.answers = {"q": ("no", status)}
    with pytest.raises(CommandError) as caught:
        await ask(address, [case("q")] * 3, concurrency=2)
    assert caught.value.code == code


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_so_many_are_under_way_at_once(endpoint: tuple[Gateway, str], concurrency: int) -> None:
    gateway, address = endpoint
    gateway.answers = {"q": ("It is so.", STOP)}
    told: list[int] = []
    async with GenerationClient(address) as client:
        outcomes = await put_questions(
            client, [case("q")] * 9, concurrency=concurrency, on_outcome=lambda done, _: told.append(done)
        )
    assert len(outcomes) == 9
    assert told == list(range(1, 10))
    assert gateway.most <= concurrency


def test_a_conversation_goes_out_as_a_user_would_send_it() -> None:
    rng = random.Random(2)
    picture, total = figure_turn(rng, held_out=True), sum_turn(rng)
    messages = request_of(Case("later", [picture, total])).conversation.messages
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert messages[0].content[0].image.startswith(b"\x89PNG")
    assert messages[0].content[1].text == picture.question
    assert messages[1].content[0].text == picture.answer
    assert messages[2].content[0].text == total.question
    assert not any(total.answer in part.text for message in messages for part in message.content)


def test_without_the_digits_it_says_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr("cedar.training.image_tasks._digits", image_tasks._digits.__wrapped__)
    assert cli.main(["eval", "--endpoint", "127.0.0.1:1", "--tasks", "1", "--recall"]) == Exit.USAGE
    assert "--tasks 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--recall", "5:x"], "--recall 5:x"), (["--ways", "sideways"], "there are: cold")],
)
def test_wrong_options_are_named(arguments: list[str], said: str, capsys: Any) -> None:
    assert cli.main(["eval", *arguments]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_percentiles_are_values_that_were_seen() -> None:
    values = [0.4, 0.1, 0.3, 0.2]
    assert [percentile(values, p) for p in (1, 50, 75, 99, 100)] == [0.1, 0.2, 0.3, 0.4, 0.4]
    assert percentile([], 50) is None


def test_the_table(tmp_path: Any) -> None:
    outcomes = [
        Outcome("sum", right=True, first_s=0.2, gaps_s=(0.01, 0.03), prompt_tokens=20, cached_tokens=8),
        Outcome("sum", first_s=0.4, gaps_s=(0.02,), prompt_tokens=22),
        Outcome("copy", error="CANCELLED: gone"),
    ]
    with (tmp_path / "screen").open("w") as file:
        screen = Console(width=160, record=True, file=file)
        screen.print(as_table(list(summaries(outcomes)), "here"))
    rows = dict(_rows(screen.export_text()))
    assert "1 / 2" in rows["sum"]
    assert "50.0 %" in rows["sum"]
    assert "200 / 400 / 400" in rows["sum"]
    assert "20 / 30 / 30" in rows["sum"]
    assert "8 / 42" in rows["sum"]
    assert "- / - / -" in rows["copy"]
    assert "1 / 3" in rows["all"]


def _rows(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.strip():
            yield line.split()[0], line
