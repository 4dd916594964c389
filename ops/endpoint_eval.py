"""``cedar eval --endpoint``: the generated questions against a running cluster, right answers beside latency.

Every question goes through the public API as a conversation, as a user would send it. An answer is right when
its text is the expected one and the model ended it.
"""

from __future__ import annotations

import asyncio
import io
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc
from cedar.training.cases import Case
from cedar.training.rows import interval
from cedar.v1 import common_pb2, generation_pb2

from .conversation_file import Turn
from .generation import conversation_message, events, explained

if TYPE_CHECKING:
    from cedar.cluster.client import GenerationClient
    from rich.table import Table

ROOM_TOKENS = 96
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Outcome:
    """What came of one question. ``gaps_s``: seconds between tokens; ``error``: why there is no answer."""

    task: str
    right: bool = False
    said: str = ""
    first_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


@dataclass
class Summary:
    """Several outcomes: how many were right, and how long they took."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def answered(self) -> list[Outcome]:
        """Those with an answer, right or wrong."""
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def right(self) -> int:
        """How many are right; a question without an answer is not."""
        return sum(outcome.right for outcome in self.outcomes)

    def record(self) -> dict[str, object]:
        """For programs. Latencies in seconds, None without any."""
        low, high = interval(self.right, len(self.outcomes))
        first = [outcome.first_s for outcome in self.answered]
        gaps = [gap for outcome in self.answered for gap in outcome.gaps_s]
        return {
            "task": self.name,
            "right": self.right,
            "asked": len(self.outcomes),
            "failed": len(self.outcomes) - len(self.answered),
            "low": low,
            "high": high,
            "prompt_tokens": sum(outcome.prompt_tokens for outcome in self.answered),
            "cached_tokens": sum(outcome.cached_tokens for outcome in self.answered),
            **{f"first_token_p{p}_s": percentile(first, p) for p in PERCENTILES},
            **{f"token_p{p}_s": percentile(gaps, p) for p in PERCENTILES},
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` of all do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def request_of(case: Case) -> generation_pb2.GenerateRequest:
    """The case's conversation, its last answer missing, to be answered greedily."""
    turns: list[Turn] = []
    for number, turn in enumerate(case.turns):
        turns.append(Turn("user", (*map(png, turn.images), turn.question)))
        if number + 1 < len(case.turns):
            turns.append(Turn("assistant", (turn.answer,)))
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=ROOM_TOKENS)
    return generation_pb2.GenerateRequest(
        conversation=conversation_message(turns, thinking=False), sampling=sampling
    )


def png(image: object) -> bytes:
    """An image's file."""
    from PIL import Image

    assert isinstance(image, Image.Image)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def put_question(
    client: GenerationClient,
    case: Case,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """One question and what came of it. A refusal is an outcome; one that no question can escape raises.

    ``CommandError`` when nothing answers at the address, or the key is wrong.
    """
    request = request_of(case)
    request.request_id = uuid.uuid4().hex
    begun, said, moments = clock(), "", []
    finished: generation_pb2.Finished | None = None
    try:
        async for event in events(client, request, timeout_s):
            if event.HasField("delta"):
                said += event.delta.text
                if event.delta.HasField("token"):
                    moments.append(clock())
            elif event.HasField("finished"):
                finished = event.finished
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED):
            raise explained(error, "the endpoint") from None
        return Outcome(case.task, error=f"{error.code().name}: {error.details()}")
    if finished is None or not moments:
        return Outcome(case.task, error="the stream ended without an answer")
    if finished.reason in (common_pb2.FINISH_REASON_FAILED, common_pb2.FINISH_REASON_CANCELLED):
        return Outcome(case.task, error=common_pb2.FinishReason.Name(finished.reason))
    sources = finished.sources
    return Outcome(
        task=case.task,
        right=said == case.turns[-1].answer and finished.reason == common_pb2.FINISH_REASON_STOP,
        said=said,
        first_s=moments[0] - begun,
        gaps_s=tuple(after - before for before, after in pairwise(moments)),
        prompt_tokens=sources.prompt_tokens,
        cached_tokens=sources.hit_local_tokens + sources.hit_store_tokens + sources.state_tokens,
    )


async def put_questions(
    client: GenerationClient,
    cases: Sequence[Case],
    *,
    concurrency: int,
    timeout_s: float | None = None,
    on_outcome: Callable[[int, Outcome], None] = lambda done, outcome: None,
) -> list[Outcome]:
    """Outcomes in the order of the cases, ``concurrency`` questions under way at once.

    ``on_outcome`` hears of each as it comes, with how many there are by then.
    """
    room, done = asyncio.Semaphore(concurrency), 0

    async def one(case: Case) -> Outcome:
        nonlocal done
        async with room:
            outcome = await put_question(client, case, timeout_s)
        done += 1
        on_outcome(done, outcome)
        return outcome

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(case)) for case in cases]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first is why the others were cancelled
    return [task.result() for task in tasks]


def summaries(outcomes: Sequence[Outcome]) -> Iterator[Summary]:
    """One for each task, then one of all."""
    by_task: dict[str, Summary] = {}
    for outcome in outcomes:
        by_task.setdefault(outcome.task, Summary(outcome.task)).outcomes.append(outcome)
    yield from by_task.values()
    yield Summary("all", list(outcomes))


def as_table(summed: Sequence[Summary], title: str) -> Table:
    """For people."""
    from .screen import table

    rows = []
    for summary in summed:
        record = summary.record()
        low, high = record["low"], record["high"]
        assert isinstance(low, float)
        assert isinstance(high, float)
        latencies = [
            " / ".join(_milliseconds(record[f"{name}_p{p}_s"]) for p in PERCENTILES)
            for name in ("first_token", "token")
        ]
        share = 100 * summary.right / len(summary.outcomes)
        rows.append(
            (
                summary.name,
                f"{summary.right} / {len(summary.outcomes)}",
                f"{share:.1f} %",
                f"{100 * low:.0f} to {100 * high:.0f}",
                record["failed"],
                f"{record['cached_tokens']} / {record['prompt_tokens']}",
                *latencies,
            )
        )
    places = "/".join(f"p{p}" for p in PERCENTILES)
    columns = (
        "task", "right", "", "95 % interval", "failed", "prompt tokens cached",
        f"first token ms {places}", f"token ms {places}",
    )  # fmt: skip
    return table(title, columns, rows, "lrrrrrrr")


def _milliseconds(value: object) -> str:
    return f"{1000 * value:.0f}" if isinstance(value, float) else "-"


def tell_progress(total: int) -> Callable[[int, Outcome], None]:
    """Progress on standard error: a line that counts on a terminal, one in ten outcomes elsewhere."""
    right = 0

    def tell(done: int, outcome: Outcome) -> None:
        nonlocal right
        right += outcome.right
        if sys.stderr.isatty():
            print(f"\r{done} of {total} answered, {right} right ", end="", file=sys.stderr, flush=True)
            if done == total:
                print(file=sys.stderr)
        elif done == total or done % max(1, total // 10) == 0:
            print(f"{done} of {total} answered, {right} right", file=sys.stderr, flush=True)

    return tell
