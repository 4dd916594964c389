"""Drafting in the Decode engine: whatever is proposed, a request's events are those of single steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cedar.actors.decode_engine import DecodeEngine, Ended, Event, Generation, PageSealed
from cedar.actors.engine_thread import EngineThread
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.scheduler import draft_room
from cedar.model import load_network
from cedar.model.draft import Proposals
from cedar.model.network import Network
from cedar.model.sampling import SamplingParams, sample
from cedar.model.state import KVMemory, SequenceState
from cedar.model.verification import Verification
from cedar.v1.common_pb2 import FinishReason

from .conftest import GOLDEN

BLOCK = 5


@pytest.fixture(scope="module")
def drafting() -> Network:
    torch.set_num_threads(1)
    return load_network(str(GOLDEN), drafting=True)


class Oracle(Network):
    """The real network; what it proposes is known from an undrafted run, and wrong at random places."""

    streams: list[list[int]]
    rng: random.Random
    rights: Sequence[int]  # how many of a block are right, one of them at random
    poison: int | None = None

    def propose(self, memory: KVMemory, seqs: Sequence[SequenceState]) -> Proposals:
        super().propose(memory, seqs)
        tokens = torch.zeros(len(seqs), BLOCK, dtype=torch.int64)
        for row, seq in enumerate(seqs):
            (stream,) = [s for s in self.streams if s[: len(seq.ids)] == seq.ids]
            said = [*stream[len(seq.ids) :], *[7] * BLOCK][:BLOCK]
            right = self.rng.choice(self.rights)
            tokens[row] = torch.tensor(said[:right] + [5 + (t + 1) % 600 for t in said[right:]])
        return Proposals(tokens, torch.full(tokens.shape, 9.0), torch.zeros(1))

    def verify(
        self, memory: KVMemory, seqs: Sequence[SequenceState], proposed: Sequence[Sequence[int]]
    ) -> Verification:
        verification = super().verify(memory, seqs, proposed)
        if self.poison is not None:
            for rows in verification.rows:
                verification.logits[rows.start + self.poison :][: len(rows) - self.poison] = torch.nan
        return verification


def oracle(
    network: Network,
    streams: list[list[int]],
    seed: int = 0,
    rights: Sequence[int] = (0, 1, 2, BLOCK, BLOCK),
    poison: int | None = None,
) -> Oracle:
    fields = {f.name: getattr(network, f.name) for f in dataclasses.fields(network) if f.init}
    made = Oracle(**fields)
    told = {"streams": streams, "rng": random.Random(seed), "rights": rights, "poison": poison}
    for name, value in told.items():
        object.__setattr__(made, name, value)
    return made


@dataclasses.dataclass(frozen=True)
class Asked:
    ids: list[int]
    sampling: SamplingParams
    count: int


def events_of(
    network: Network, asked: list[Asked], drafts: bool
) -> tuple[dict[str, list[Event]], DecodeEngine]:
    """Every request's events, all of them decoded together from their prefills on."""
    told: dict[str, list[Event]] = {}

    def sink(events: Sequence[Event]) -> None:
        for event in events:
            told.setdefault(event.request_id, []).append(event)

    memory = NetworkMemory.load(
        "", stage="decode", device="cpu", page_tokens=None, pages=40, slots=len(asked), network=network
    )
    engine = DecodeEngine(memory, EngineThread("test", 1), sink, drafting=drafts)
    for slot, request in enumerate(asked):
        state = SequenceState(slot=slot, pages=list(range(slot * 8, slot * 8 + 8)), ids=list(request.ids))
        network.prefill(memory.kv, state, len(state.ids))
        first = sample(network.finish_prefill(memory.kv, state), request.sampling, len(state.ids))
        state.ids.append(first.id)
        engine._running[f"r{slot}"] = Generation(f"r{slot}", state, request.sampling, request.count, 0)
    while engine.step():
        pass
    return told, engine


def streams_of(told: dict[str, list[Event]]) -> list[list[int]]:
    return [list(event.ids) for events in told.values() for event in events if isinstance(event, Ended)]


def test_any_acceptance_gives_the_events_of_single_steps(drafting: Network, prompt: Any) -> None:
    """Greedy and drawn, log-probabilities, page ends, end tokens inside a block, limits: in one batch."""
    drawn = SamplingParams(temperature=1.1, seed=3, logprobs=2, ignore_eos=True)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    asked = [
        Asked(prompt(1, 20), greedy, 15),
        Asked(prompt(2, 31), drawn, 18),
        Asked(prompt(3, 5), drawn, 2),
        Asked(prompt(4, 33), dataclasses.replace(drawn, seed=9), 12),
    ]
    plain, _ = events_of(drafting, asked, False)
    stop = plain["r3"][-5].token.id  # type: ignore[union-attr]
    asked[3] = dataclasses.replace(
        asked[3], sampling=dataclasses.replace(asked[3].sampling, stop_ids=(stop,))
    )
    plain, undrafted = events_of(drafting, asked, False)
    assert [plain[f"r{n}"][-1].reason for n in range(4)] == [  # type: ignore[union-attr]
        *[FinishReason.FINISH_REASON_LENGTH] * 3,
        FinishReason.FINISH_REASON_STOP,
    ]
    assert any(isinstance(event, PageSealed) for event in plain["r1"])
    for seed in range(2):
        told, engine = events_of(oracle(drafting, streams_of(plain), seed), asked, True)
        assert told == plain
        assert 0 < engine.draft_accepted < engine.draft_proposed
        assert engine.steps < undrafted.steps


def test_the_stages_own_proposals_change_nothing_either(drafting: Network, prompt: Any) -> None:
    asked = [Asked(prompt(5, 40), SamplingParams(temperature=0), 9), Asked(prompt(6, 9), SamplingParams(), 9)]
    plain, _ = events_of(drafting, asked, False)
    told, engine = events_of(drafting, asked, True)
    assert told == plain
    assert engine.draft_proposed > 0


def test_the_end_of_the_context(drafting: Network, prompt: Any) -> None:
    short = dataclasses.replace(
        drafting, config=dataclasses.replace(drafting.config, max_position_embeddings=40)
    )
    asked = [Asked(prompt(7, 22), SamplingParams(temperature=0, ignore_eos=True), 100)]
    plain, _ = events_of(short, asked, False)
    assert len(streams_of(plain)[0]) == 40
    assert events_of(oracle(short, streams_of(plain), 1), asked, True)[0] == plain


@pytest.mark.parametrize("poison", [0, 1, BLOCK])
def test_logits_that_are_not_finite_count_only_where_the_stream_gets(
    drafting: Network, prompt: Any, poison: int
) -> None:
    asked = [Asked(prompt(8, 20), SamplingParams(temperature=0, ignore_eos=True), 9)]
    plain, _ = events_of(drafting, asked, False)
    reached, _ = events_of(oracle(drafting, streams_of(plain), rights=[BLOCK], poison=poison), asked, True)
    end = reached["r0"][-1]
    assert isinstance(end, Ended)
    assert (end.reason, end.record) == (FinishReason.FINISH_REASON_FAILED, None)
    assert reached["r0"][:-1] == plain["r0"][:poison]
    if poison:
        spared, _ = events_of(
            oracle(drafting, streams_of(plain), rights=[poison - 1], poison=poison), asked, True
        )
        assert spared == plain


@pytest.mark.parametrize(
    ("index", "length", "room"),
    [(0, 50, 6), (5, 50, 1), (6, 50, 0), (7, 50, 0), (0, 95, 3), (0, 98, 0), (0, 99, 0)],
)
def test_room_for_proposals(index: int, length: int, room: int) -> None:
    assert draft_room(index=index, length=length, max_tokens=8, context=100) == room


async def test_through_the_workers(drafting: Network, rig: Any, prompt: Any, single: Any) -> None:
    """Prefill hands the rings over; a second turn goes on from the record; a resume, too."""
    ids = prompt(9, 70)
    on = {"drafting": True, "draft_confidence": 0.0}
    async with rig(other=drafting, store=True, prefill={"drafting": True}, decode=on, decodes=2) as cluster:
        reply = await cluster.generate(cluster.request(ids, 12))
        assert reply.ids == single.cold(ids, 12)
        counters = cluster.decode.status().counters
        assert counters["draft_proposed"] >= 5 * 5
        assert counters["draft_accepted"] <= counters["draft_proposed"]
        turn = [*ids, *reply.ids, *prompt(10, 20)]
        again = await cluster.generate(cluster.request(turn, 6, **await cluster.offer(turn)))
        assert again.sources.state_restored
        resumed = [*ids, *reply.ids[:5]]
        request = cluster.request(resumed, 12, decode=1, prompt_tokens=len(ids))
        assert (await cluster.generate(request, decode=1, start=5)).ids == reply.ids[5:]
    async with rig(store=True) as cluster:
        first = await cluster.generate(cluster.request(ids, 12))
        offered = await cluster.offer(turn)
        assert (await cluster.generate(cluster.request(turn, 6, **offered))).ids == again.ids
        assert first.ids == reply.ids
