"""serve, generate, eval, status and stop as a user types them, on a real local cluster of the built-in model
with two store nodes, some of whose processes are killed.

Questions and right answers come from the generators that the model is judged with.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cedar.cluster import remote, state_file
from cedar.cluster.client import GenerationClient
from cedar.cluster.remote import WorkerReport
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from cedar.ops.conversation_file import Turn as Message
from cedar.ops.endpoint_eval import png, put_questions
from cedar.ops.generation import conversation_message
from cedar.training.cases import Case
from cedar.training.conversations import Measure, recall_conversation
from cedar.training.image_tasks import figure_turn
from cedar.training.serving import built_in_model
from cedar.training.text_tasks import Turn, continue_turn, copy_turn, sort_turn, sum_turn
from cedar.training.tokenization import WordEncoder
from cedar.v1 import common_pb2, generation_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SETTINGS = (
    "gateway.port=0",
    "gateway.max_prompt_tokens=2048",
    "store.nodes=2",
    "store.lease_s=1",
)


def cedar(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cedar.ops.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@dataclass(frozen=True)
class Served:
    """A running cluster: its environment, its process, its address."""

    environment: dict[str, str]
    process: subprocess.Popen[str]
    address: str

    def reports(self, stage: str) -> list[WorkerReport]:
        """Those that answer."""
        with patch.dict(os.environ, CEDAR_STATE_DIR=self.environment["CEDAR_STATE_DIR"]):
            found = remote.status(state_file.find("default"))
        return [w for w in found.workers if w.entry.stage == stage and not w.error]

    def kill(self, reports: list[WorkerReport]) -> set[int]:
        pids = {report.entry.pid for report in reports}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def wait_for(self, stage: str, count: int, killed: set[int]) -> list[WorkerReport]:
        """Until so many answer, none of those that were killed."""
        deadline = time.monotonic() + 90
        while True:
            found = [r for r in self.reports(stage) if r.entry.pid not in killed]
            if len(found) == count:
                return found
            assert time.monotonic() < deadline, f"{len(found)} of {count} in stage {stage}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="serve-") as scratch:
        environment = {**os.environ, "CEDAR_STATE_DIR": f"{scratch}/state", "TMPDIR": scratch}
        command = [sys.executable, "-m", "cedar.ops.cli", "serve"]
        for setting in SETTINGS:
            command += ["--set", setting]
        with open(f"{scratch}/log", "w") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("serving on "), Path(f"{scratch}/log").read_text()
            assert "page_ttl_s: 259200" in Path(f"{scratch}/log").read_text()
            yield Served(environment, process, first.split()[-1])
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def measure() -> Measure:
    return WordEncoder(Tokenizer.load(Storage(str(built_in_model()))).backend).measure


class Conversation:
    """One user's turns with the cluster; the answers are its own."""

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._turns: list[Message] = []

    async def ask(self, turn: Turn, at_token: Any = None) -> tuple[str, generation_pb2.Finished]:
        """The answer, and its account. ``at_token``: called once the first token is there."""
        self._turns.append(Message("user", (*map(png, turn.images), turn.question)))
        request = generation_pb2.GenerateRequest(
            conversation=conversation_message(self._turns, thinking=False),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=96),
        )
        said, finished = "", None
        async for event in self._client.generate(request):
            if event.HasField("delta"):
                said += event.delta.text
                if at_token is not None:
                    await asyncio.to_thread(at_token)
                    at_token = None
            elif event.HasField("finished"):
                finished = event.finished
        assert finished is not None
        self._turns.append(Message("assistant", (said,)))
        return said, finished


async def test_answers_are_right_however_the_state_came_to_be(served: Served, measure: Measure) -> None:
    """Cold, going on from window state, after that was lost, and after a Decode worker was killed.

    Window state lives in the store nodes' memory, pages on their disks, so killing a node loses the one and
    not the other.
    """
    rng = random.Random(5)
    async with GenerationClient(served.address) as client:
        makers = (sum_turn, copy_turn, sort_turn, continue_turn)
        cases = [Case(make.__name__, [make(rng)]) for make in makers]
        cases += [Case("figure", [figure_turn(rng, held_out=True)]) for _ in range(2)]
        for outcome in await put_questions(client, cases, concurrency=4):
            assert outcome.right, outcome

        talk = Conversation(client)
        first, second, third, fourth = recall_conversation(rng, 700, 5, 4, measure)
        longest = max((copy_turn(rng) for _ in range(20)), key=lambda turn: measure(turn.answer))
        said, end = await talk.ask(first)
        assert said == first.answer
        assert end.sources.computed_tokens == end.sources.prompt_tokens > 512
        assert end.traffic.pages_stored == end.traffic.pages_sealed >= 2
        said, end = await talk.ask(second)
        assert said == second.answer
        assert end.sources.state_restored
        assert end.sources.computed_tokens < 40

        nodes = served.reports("store")
        pages = [(node.store or {})["store_pages"] for node in nodes]
        assert len(pages) == 2
        assert sum(pages) >= 2
        killed = served.kill(nodes[:1])
        said, end = await talk.ask(third)
        assert (said, end.retries) == (third.answer, 0)

        nodes = await asyncio.to_thread(served.wait_for, "store", 2, killed)
        assert sum((node.store or {})["store_pages"] for node in nodes) >= sum(pages), (
            "they have theirs again"
        )
        killed = served.kill(nodes)
        said, end = await talk.ask(fourth)
        assert (said, end.retries) == (fourth.answer, 0)
        assert not end.sources.state_restored
        assert end.sources.replayed_tokens == 128
        assert end.sources.hit_local_tokens + end.sources.hit_store_tokens >= 512

        def kill_decoding() -> None:
            busy = [r for r in served.reports("decode") if r.status is not None and r.status.active]
            assert len(served.kill(busy)) == 1

        said, end = await talk.ask(longest, kill_decoding)
        assert (said, end.retries) == (longest.answer, 1)
    await asyncio.to_thread(served.wait_for, "store", 2, killed)


def test_eval_of_the_endpoint(served: Served) -> None:
    finished = cedar(
        served.environment,
        *("eval", "--endpoint", served.address, "--recall", "200:3", "--tasks", "0"),
        *("--concurrency", "2", "--json"),
    )
    assert finished.returncode == 0, finished.stderr
    assert "3 of 3 answered, 3 right" in finished.stderr
    of_task, of_all = (json.loads(line) for line in finished.stdout.splitlines())
    assert (of_task["task"], of_all["task"]) == ("recall 200", "all")
    for record in (of_task, of_all):
        assert (record["right"], record["asked"], record["failed"]) == (3, 3, 0)
        assert 0 < record["first_token_p50_s"] <= record["first_token_p99_s"]
        assert 0 <= record["token_p50_s"] <= record["token_p99_s"]
        assert record["prompt_tokens"] > 300


def test_leaving_a_stream_frees_what_it_held(served: Served, cedar_command: list[str]) -> None:
    process = subprocess.Popen(
        [*cedar_command, "generate", "Hello", "--temperature", "9", "--max-tokens", "1000"],  # all but random
        env=served.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said
    assert said.rstrip().endswith("cedar: interrupted")
    held = [r.status for r in served.reports("decode") + served.reports("prefill") if r.status is not None]
    assert not any(status.slots_leased or status.pages_leased for status in held), "freed before it returns"


def test_a_session(served: Served, tmp_path: Path) -> None:
    environment, address = served.environment, served.address
    rng = random.Random(6)
    picture, follow_up = figure_turn(rng, held_out=True), sum_turn(rng)
    image = tmp_path / "figure.png"
    image.write_bytes(png(picture.images[0]))

    talk = str(tmp_path / "talk.json")
    asked = ("generate", picture.question, "--image", str(image), "--temperature", "0")
    first = cedar(environment, *asked, "--conversation", talk)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{picture.answer}\n"
    assert "generated (stop)" in first.stderr
    drawn = ("--temperature", "1.2", "--seed", "3", "--max-tokens", "8")
    again = [cedar(environment, "generate", "Hello", *drawn).stdout for _ in range(2)]
    assert again[0] == again[1]
    second = cedar(
        environment, "generate", follow_up.question, "--conversation", talk, "--temperature", "0", "--json"
    )
    records = [json.loads(line) for line in second.stdout.splitlines()]
    deltas = records[1:-1]
    assert [record["event"] for record in records] == ["started", *["delta"] * len(deltas), "finished"]
    assert "".join(record["text"] for record in deltas) == follow_up.answer
    assert len(deltas) == records[-1]["completion_tokens"], "a whole answer leaves no text held back"
    assert records[-1]["sources"]["prompt_tokens"] > 20
    assert len(json.loads(Path(talk).read_text())) == 4

    served.wait_for("decode", 2, set())  # Serve replaces the one that was killed
    shown = cedar(environment, "status")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert address in shown.stdout
    assert "drafts accepted/all" in shown.stdout
    record = json.loads(cedar(environment, "status", "--json").stdout)
    stages = sorted(worker["stage"] for worker in record["workers"])
    assert stages == ["decode", "decode", "encoder", "gateway", "prefill", "store", "store"]
    assert all(worker["status"]["slots_leased"] == 0 for worker in record["workers"] if worker["status"])

    long = cedar(environment, "generate", "word " * 2500)
    assert long.returncode == 2
    assert "2048" in long.stderr
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"this is no image")
    refused = cedar(environment, "generate", "What is this?", "--image", str(broken))
    assert refused.returncode == 2
    assert "image" in refused.stderr
    assert "Traceback" not in long.stderr + refused.stderr

    twin = cedar(environment, "serve", "--quiet")
    assert twin.returncode == 2
    assert "runs already" in twin.stderr
    assert "--name" in twin.stderr
    port = f"gateway.port={address.split(':')[1]}"
    taken = cedar(environment, "serve", "-c", "local-cpu", "--quiet", "--name", "b", "--set", port)
    assert taken.returncode == 2
    assert "in use" in taken.stderr

    stopped = cedar(environment, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert served.process.wait(20) == 0
    gone = cedar(environment, "generate", "Hello", "--address", address)
    assert gone.returncode == 3
    assert cedar(environment, "eval", "--endpoint", address, "--recall", "--tasks", "1").returncode == 3
    assert cedar(environment, "status").returncode == 3
    scratch = Path(environment["TMPDIR"])
    deadline = time.monotonic() + 5
    while (
        left := {path.name for path in scratch.iterdir()} - {"log", "state"}
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()
