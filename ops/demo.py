"""The demonstration: questions with right and wrong answers, through a whole cluster on this machine.

1. Start the ``local-cpu`` preset, the built-in model, with one Encoder, one Prefill, two Decode workers, one
   store node.
2. A picture, drawn for the occasion, and what is in it.
3. A long text that hides some facts, and a question about one of them; then, as the next turn of the same
   conversation, about another: its prompt goes on from what is kept of the first.
4. A table of what happened, and a clean end on every path.

Questions and answers come from the generators that the model's evaluation uses, never from a list here.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cedar.v1 import common_pb2, generation_pb2

from .conversation_file import Turn
from .exits import CommandError, Exit
from .generation import Reply, conversation_message, reason_name, stream_reply
from .progress_view import StepView
from .screen import console, seconds, size, table

if TYPE_CHECKING:
    from cedar.cluster.config import ClusterConfig
    from cedar.cluster.launch import RunningCluster
    from rich.table import Table

PRESET = "local-cpu"
OVERRIDES = (
    "gateway.port=0",
    "encoder.autoscaling.min=1",
    "prefill.autoscaling.min=1",
    "decode.autoscaling.min=2",
    "store.nodes=1",
)
TEXT_TOKENS = 1200
FACTS = 3
SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Question:
    """One thing to ask. ``answer`` is None when nobody knows it; ``follows``: it is a next turn."""

    title: str
    text: str
    answer: str | None
    image: bytes | None = None
    follows: bool = False


@dataclass(frozen=True)
class Answered:
    """A question and what came back."""

    question: Question
    reply: Reply

    @property
    def right(self) -> bool | None:
        """Whether it is the right answer; None when nobody knows."""
        return None if self.question.answer is None else self.reply.text.strip() == self.question.answer


@dataclass(frozen=True)
class Outcome:
    """What the table is made of. ``started_s``: from the command's start."""

    model: generation_pb2.GetModelResponse
    answered: tuple[Answered, ...]
    started_s: float


def run_demo(*, image: Path | None, max_tokens: int, seed: int) -> Exit:
    """Run all of it. Raises ``CommandError`` for what the user can mend."""
    began = time.monotonic()
    from cedar.cluster.config_load import load_config

    config = load_config(PRESET, OVERRIDES)
    asked = questions(config, None if image is None else image.read_bytes(), seed)
    print(
        "Cedar's demo: one Encoder, one Prefill, two Decode workers and a store node on this machine, with\n"
        "the built-in model: the whole architecture at small width, trained on generated tasks alone.\n",
        flush=True,
    )
    with interrupt_on_sigterm():
        cluster = start(config)
        try:
            started_s = time.monotonic() - began
            print(f"\nserving on {cluster.address} after {started_s:.1f} s\n", flush=True)
            outcome = asyncio.run(converse(cluster.address, asked, max_tokens, started_s))
            console().print(report(outcome))
            print(f"{verdict(outcome)}; {drafted(cluster)}", flush=True)
        finally:
            shut_down(cluster)
    print(f"done in {time.monotonic() - began:.1f} s; nothing is left running", flush=True)
    return Exit.FAILED if any(answered.reply.failed for answered in outcome.answered) else Exit.OK


def questions(config: ClusterConfig, picture: bytes | None, seed: int) -> list[Question]:
    """What is asked, the same for the same seed: about a picture, and twice about a long text.

    ``picture``: the user's own, of which no right answer is known. Raises ``CommandError``.
    """
    from cedar.model.storage import Storage
    from cedar.model.tokenizer import Tokenizer
    from cedar.training.conversations import recall_conversation
    from cedar.training.image_tasks import figure_turn
    from cedar.training.tokenization import WordEncoder

    from .endpoint_eval import png

    if not (Path(config.model.path) / "config.json").exists():
        where = f"the built-in model is not at {config.model.path}"
        raise CommandError(f"{where}: the installation is incomplete")
    rng = random.Random(seed)
    figure = figure_turn(rng, held_out=True)
    measure = WordEncoder(Tokenizer.load(Storage(config.model.path)).backend).measure
    first, second = recall_conversation(rng, TEXT_TOKENS, FACTS, 2, measure)
    return [
        Question("a picture", figure.question, figure.answer, png(figure.images[0]))
        if picture is None
        else Question("your picture", figure.question, None, picture),
        Question("a long text", first.question, first.answer),
        Question("a second turn", second.question, second.answer, follows=True),
    ]


def start(config: ClusterConfig) -> RunningCluster:
    """Start the cluster, showing every step."""
    from cedar.cluster.launch import start

    print("starting:", flush=True)
    with StepView(sys.stdout) as view:
        return start(config, name=f"demo-{os.getpid()}", on_progress=view)


def shut_down(cluster: RunningCluster) -> None:
    """Stop the cluster; a second Ctrl-C does not cut the cleaning short."""
    began = time.monotonic()
    with interrupts_ignored():
        print("\nshutting down ...", flush=True)
        cluster.stop()
    print(f"shut down in {time.monotonic() - began:.1f} s", flush=True)


async def converse(address: str, asked: list[Question], max_tokens: int, started_s: float) -> Outcome:
    """All questions, answers printed as they stream. A next turn carries what was really said before it."""
    from cedar.cluster.client import GenerationClient

    async with GenerationClient(address) as client:
        model = await client.get_model()
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens)
    turns: list[Turn] = []
    answered = []
    for number, question in enumerate(asked, 1):
        if not question.follows:
            turns = []
        parts = (question.text,) if question.image is None else (question.image, question.text)
        turns.append(Turn("user", parts))
        request = generation_pb2.GenerateRequest(
            conversation=conversation_message(turns, thinking=False), sampling=sampling
        )
        print(f"{number}. {question.title}: {shortened(question)}\n  > ", end="", flush=True)
        said = Answered(question, await stream_reply(request, address, sys.stdout))
        turns.append(Turn("assistant", (said.reply.text,)))
        answered.append(said)
        print(f"  {judged(said)}\n  {said.reply.summary()}\n", flush=True)
    return Outcome(model, tuple(answered), started_s)


def shortened(question: Question) -> str:
    """A question as it is shown: of a long text the beginning and the end."""
    text = question.text
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return text if question.image is None else f"(an image of {size(len(question.image))}) {text}"


def judged(answered: Answered) -> str:
    """Right or wrong, in words."""
    if answered.right is None:
        return "(your picture: no right answer is known)"
    return "right" if answered.right else f"wrong, the right answer is: {answered.question.answer}"


def verdict(outcome: Outcome) -> str:
    """How many answers are right."""
    known = [answered for answered in outcome.answered if answered.right is not None]
    return f"{sum(bool(answered.right) for answered in known)} of {len(known)} answers are right"


def drafted(cluster: RunningCluster) -> str:
    """What the draft stages came to, in words."""
    counters = [worker.status.counters for worker in cluster.status().workers if worker.status is not None]
    proposed, accepted = (
        sum(counts[name] for counts in counters if name in counts)
        for name in ("draft_proposed", "draft_accepted")
    )
    return f"of {proposed:.0f} drafted tokens {accepted:.0f} were accepted"


def report(outcome: Outcome) -> Table:
    """The closing table: one column a question."""
    ends = [a.reply.finished for a in outcome.answered if a.reply.finished is not None]
    rows: list[tuple[str, ...]] = []

    def row(name: str, value: Callable[[generation_pb2.Finished], object]) -> None:
        rows.append((name, *[str(value(end)) for end in ends]))

    row("prompt tokens", lambda end: end.sources.prompt_tokens)
    row("  from pages in Prefill's memory", lambda end: end.sources.hit_local_tokens)
    row("  from pages in the store", lambda end: end.sources.hit_store_tokens)
    row("  from the window record's tail", lambda end: end.sources.state_tokens)
    row("  computed", lambda end: end.sources.computed_tokens)
    row("window state", window_state)
    row("tokens generated", lambda end: f"{end.completion_tokens} ({reason_name(end.reason)})")
    row("time: waiting", lambda end: seconds(end.times.queue_s))
    row("time: Encoder", lambda end: seconds(end.times.encoder_s))
    row("time: Prefill", lambda end: seconds(end.times.prefill_s))
    row("time: handoff after the last chunk", lambda end: seconds(end.times.handoff_s))
    row("time: Decode", lambda end: seconds(end.times.decode_s))
    row("time to the first token", lambda end: seconds(end.times.ttft_s))
    row("pages hit", lambda end: end.traffic.pages_hit)
    row("pages sealed", lambda end: end.traffic.pages_sealed)
    row(
        "pages sent, Prefill to Decode", lambda end: sent(end.traffic.pages_sent, end.traffic.page_bytes_sent)
    )
    row("pages accepted by the store", lambda end: end.traffic.pages_stored)
    row("window state sent", lambda end: size(end.traffic.state_bytes_sent))
    row("image features sent", lambda end: sent(end.traffic.images_encoded, end.traffic.feature_bytes_sent))
    model = outcome.model
    title = (
        f"{model.name}: {model.bytes_per_token:g} bytes of packed KV a token; "
        f"a page is {model.page_tokens} tokens, {size(model.page_bytes)}"
    )
    titles = [a.question.title for a in outcome.answered if a.reply.finished is not None]
    return table(title, ("", *titles), rows, "l" + "r" * len(titles))


def window_state(end: generation_pb2.Finished) -> str:
    """How the rings and tails came to be."""
    if end.sources.state_restored:
        return "restored from DRAM"
    if end.sources.replayed_tokens:
        return f"rebuilt: {end.sources.replayed_tokens} tokens replayed"
    return "computed with the prompt"


def sent(count: int, volume: int) -> str:
    """A count and its bytes."""
    return f"{count} ({size(volume)})" if count else "0"


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the cluster is stopped on the way out."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let nothing interrupt the block."""
    previous = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
