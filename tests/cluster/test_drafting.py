"""Drafting through the whole cluster, with the built-in model, whose draft stages are often right: nothing
that a client sees, and nothing that is kept, tells whether tokens were drafted.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from cedar.cluster.client import GenerationClient
from cedar.training.conversations import recall_conversation
from cedar.training.serving import built_in_model
from cedar.training.text_tasks import continue_turn, copy_turn
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import Stack, collect, finished_of, idle, local_config, running, text_of

pytestmark = pytest.mark.slow

PAGE_TOKENS = 16  # pages fill while several tokens of a block are accepted


def questions() -> list[pb.GenerateRequest]:
    """Greedy and drawn, cut by a stop string, by a limit, and by the model; one with much to attend to."""
    rng = random.Random(11)
    copy, more = copy_turn(rng), continue_turn(rng)
    (recall,) = recall_conversation(rng, 150, 2, 1, lambda text: len(text) // 4)
    return [
        asked(copy.question, temperature=0),
        asked(copy.question, temperature=0, max_tokens=6),
        asked(more.question, temperature=0.7, seed=4, top_p=0.95),
        asked(recall.question, temperature=0, stop=[" is"]),
        asked("Which word comes next?", temperature=1.3, seed=5, max_tokens=20, ignore_eos=True),
    ]


def asked(text: str, **sampling: Any) -> pb.GenerateRequest:
    message = pb.Message(role="user", content=[{"text": text}])
    wanted = common.SamplingParams(**({"max_tokens": 24, "logprobs": 2} | sampling))
    return pb.GenerateRequest(conversation=pb.Conversation(messages=[message]), sampling=wanted)


async def answers(folder: Path, drafting: bool) -> tuple[list[Any], dict[str, int], set[bytes]]:
    """All that a client can tell, what Decode counted, and the names of what the store keeps."""
    config = local_config(
        f"model.path={built_in_model()}",
        "model.preset=",
        f"model.page_tokens={PAGE_TOKENS}",
        f"decode.drafting={drafting}",
    )
    told = []
    async with running(config, folder) as stack, GenerationClient(stack.address, "key-a") as client:
        for request in questions():
            seen = await collect(client, request)
            events = [r.delta.token for r in seen if r.HasField("delta") and r.delta.HasField("token")]
            tokens = [(e.index, e.id, e.logprob, [(t.id, t.logprob) for t in e.top]) for e in events]
            end = finished_of(seen)
            told.append((tokens, text_of(seen), end.reason, end.stop, end.completion_tokens))
            await idle(stack)
        return told, counted(stack), set(stack.store.windows._held)


def counted(stack: Stack) -> dict[str, int]:
    counters = [worker.status().counters for worker in stack.decode]
    names = ("steps", "tokens", "draft_proposed", "draft_accepted", "ended_cancelled")
    return {name: int(sum(c[name] for c in counters if name in c)) for name in names}


async def test_nobody_can_tell(tmp_path: Path) -> None:
    plain, undrafted, windows = await answers(tmp_path / "plain", False)
    told, drafted, kept = await answers(tmp_path / "drafted", True)
    assert told == plain
    assert [reason for _, _, reason, _, _ in told] == [
        common.FINISH_REASON_STOP,
        common.FINISH_REASON_LENGTH,
        common.FINISH_REASON_STOP,
        common.FINISH_REASON_STOP_STRING,
        common.FINISH_REASON_LENGTH,
    ]
    assert undrafted["draft_proposed"] == 0
    assert 0 < drafted["draft_accepted"] < drafted["draft_proposed"]
    assert drafted["steps"] < undrafted["steps"]
    # A stop string cancels a request somewhere behind it, and leaves the state of wherever that was.
    assert len(kept ^ windows) <= 2
