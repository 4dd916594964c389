"""The demonstration: one conversation of two turns through a whole cluster on this machine.

1. Start the ``local-cpu`` preset with one Encoder, one Prefill, two Decode workers, one store node.
2. First turn: an image and a question, as a ``Conversation`` over gRPC. Tokens are printed as they come.
3. Second turn: the token ids of the first turn, its answer and a new question. Ids rather than text,
   since the gibberish of random weights does not survive being decoded to text and encoded again.
4. A table of what happened, and a clean end on every path.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
IMAGE_NAME = "image.png"
SYSTEM = (
    "You look at pictures with care. Say what is in them, how the parts lie to each other, and what you are "
    "not sure of. Be brief and exact."
)
QUESTIONS = ("What is in this picture?", "And what else?")
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Outcome:
    """What the table is made of. ``started_s``, ``total_s``: from the command's start."""

    model: generation_pb2.GetModelResponse
    replies: tuple[Reply, ...]
    started_s: float


def run_demo(*, image: Path | None, max_tokens: int, seed: int) -> Exit:
    """Run all of it. Raises ``CommandError`` for what the user can mend."""
    began = time.monotonic()
    from cedar.cluster.config_load import load_config

    config = load_config(PRESET, OVERRIDES)
    picture = read_picture(config, image)
    print(
        "Cedar's demo: one Encoder, one Prefill, two Decode workers and a store node on this machine,\n"
        "with the small test checkpoint. Its weights are random, so what it says is gibberish; the way that\n"
        "the tokens take is the real one.\n",
        flush=True,
    )
    with interrupt_on_sigterm():
        cluster = start(config)
        try:
            started_s = time.monotonic() - began
            print(f"\nserving on {cluster.address} after {started_s:.1f} s\n", flush=True)
            outcome = asyncio.run(converse(config, cluster.address, picture, max_tokens, seed, started_s))
            console().print(report(outcome))
        finally:
            shut_down(cluster)
    print(f"done in {time.monotonic() - began:.1f} s; nothing is left running", flush=True)
    return Exit.FAILED if any(reply.failed for reply in outcome.replies) else Exit.OK


def read_picture(config: ClusterConfig, image: Path | None) -> bytes:
    """The image to ask about. The checkpoint brings one; only a source tree has the checkpoint."""
    checkpoint = Path(config.model.path)
    if not (checkpoint / "config.json").exists():
        raise CommandError(
            f"the demo's small checkpoint is not at {checkpoint}: run `make demo` in a source tree"
        )
    return (image or checkpoint / IMAGE_NAME).read_bytes()


def start(config: ClusterConfig) -> RunningCluster:
    """Start the cluster, showing every step."""
    from cedar.cluster.launch import start

    print("starting:", flush=True)
    with StepView(sys.stdout) as view:
        return start(config, name=f"demo-{os.getpid()}", on_progress=view)


def shut_down(cluster: RunningCluster) -> None:
    """Stop the cluster; a second Ctrl-C does not cut the cleaning short."""
    began = time.monotonic()
    print("\nshutting down ...", flush=True)
    with interrupts_ignored():
        cluster.stop()
    print(f"shut down in {time.monotonic() - began:.1f} s", flush=True)


async def converse(
    config: ClusterConfig, address: str, picture: bytes, max_tokens: int, seed: int, started_s: float
) -> Outcome:
    """Both turns, printed as they stream."""
    from cedar.cluster.client import GenerationClient

    async with GenerationClient(address) as client:
        model = await client.get_model()
    sampling = common_pb2.SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=max_tokens)
    turns = [Turn("system", (SYSTEM,)), Turn("user", (picture, QUESTIONS[0]))]
    first = generation_pb2.GenerateRequest(
        conversation=conversation_message(turns, thinking=False), sampling=sampling
    )
    replies = [await ask(first, address, f"turn 1  (an image of {size(len(picture))}) {QUESTIONS[0]}")]
    ids = second_turn_ids(config.model.path, picture, replies[0].ids)
    second = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=ids), images=[picture], sampling=sampling
    )
    replies.append(await ask(second, address, f"turn 2  {QUESTIONS[1]}"))
    return Outcome(model, tuple(replies), started_s)


async def ask(request: generation_pb2.GenerateRequest, address: str, title: str) -> Reply:
    """Print the question, then the answer as it streams."""
    print(f"{title}\n  > ", end="", flush=True)
    reply = await stream_reply(request, address, sys.stdout)
    print(f"  {reply.summary()}\n", flush=True)
    return reply


def second_turn_ids(checkpoint: str, picture: bytes, answer: Sequence[int]) -> list[int]:
    """Prompt ids of the second turn: the first turn's, the answer's very ids, and the next question."""
    from cedar.model.chat import ChatOptions, ImagePart, Message
    from cedar.model.prompt import PromptFormat

    prompts = PromptFormat.open(checkpoint)
    options = ChatOptions(thinking=False)
    asked = (
        Message(role="system", content=(SYSTEM,)),
        Message(role="user", content=(ImagePart(picture), QUESTIONS[0])),
    )
    opening = prompts.encode_chat(asked, options).ids
    silent = Message(role="assistant", content=("",), reasoning="")
    follow_up = Message(role="user", content=(QUESTIONS[1],))
    whole = prompts.encode_chat([*asked, silent, follow_up], options).ids
    rest = whole[len(opening) :]  # the end token, then the new question
    said = list(answer[:-1]) if answer and answer[-1] == rest[0] else list(answer)
    image = prompts.config.image_token_id
    if image in said:  # random weights may say it; in a prompt it would announce a second image
        said = said[: said.index(image)]
    return [*opening, *said, *rest]


def report(outcome: Outcome) -> Table:
    """The closing table: one column a turn."""
    ends = [reply.finished for reply in outcome.replies if reply.finished is not None]
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
    return table(title, ("", *[f"turn {n}" for n in range(1, len(ends) + 1)]), rows, "lrr")


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
