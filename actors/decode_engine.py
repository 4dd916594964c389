"""Continuous batching: one forward a step for every running sequence, on the engine's own thread.

With drafting a step verifies proposals beside each sequence's last token. Every row is sampled as it would be
without them, with the draw of its own position, and a proposal stays while it is what was sampled: streams
are the same to the bit, greedy or not, log-probabilities included.

The thread owns the running sequences; the loop's thread owns pages, slots and logs. They talk through calls
(add, cancel, restore, shut) that run between steps, and events, one list a step, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import Unavailable
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.sampling import stage_token
from cedar.actors.scheduler import draft_room, finish_reason
from cedar.v1.common_pb2 import FinishReason, TokenEvent

if TYPE_CHECKING:
    from cedar.model.sampling import SampledToken, SamplingParams
    from cedar.model.state import SequenceState


@dataclass
class Generation:
    """A sequence being decoded. ``ids[length]`` is the last token, not run yet; ``index`` its number."""

    request_id: str
    state: SequenceState
    sampling: SamplingParams
    max_tokens: int
    index: int


@dataclass(frozen=True)
class TokenOut:
    """The next token of a request."""

    request_id: str
    token: TokenEvent


@dataclass(frozen=True)
class PageSealed:
    """Page ``page`` of a request is complete; ``ids`` are its tokens, ``payload`` its bytes."""

    request_id: str
    page: int
    ids: tuple[int, ...]
    payload: bytes


@dataclass(frozen=True)
class Ended:
    """A request is over; the engine does not touch its pages or slot any more.

    ``ids[:length]`` have run; ``record`` is the window state at ``length``, None after a failure.
    """

    request_id: str
    reason: FinishReason
    detail: str
    ids: tuple[int, ...]
    length: int
    record: bytes | None


Event = TokenOut | PageSealed | Ended


class DecodeEngine:
    """Runs sequences until they end. ``sink`` gets events on the engine's thread."""

    def __init__(
        self,
        memory: NetworkMemory,
        thread: EngineThread,
        sink: Callable[[Sequence[Event]], None],
        *,
        drafting: bool = False,
        draft_confidence: float = 0.0,
    ) -> None:
        """``drafting`` needs a network with its draft module; ``draft_confidence`` see DecodeConfig."""
        self._memory = memory
        self._drafting = drafting
        self._draft_confidence = draft_confidence
        self._thread = thread
        self._sink = sink
        self._running: dict[str, Generation] = {}
        self._closed = False
        self.steps = 0
        self.tokens = 0
        self.largest_batch = 0
        self.draft_proposed = 0
        self.draft_accepted = 0

    async def add(self, generation: Generation) -> None:
        """Start decoding a sequence whose state is in place."""

        def enter() -> None:
            if self._closed:
                raise Unavailable("the decode engine has stopped")
            self._running[generation.request_id] = generation

        await self._thread.call(enter)
        self._thread.wake()

    async def cancel(self, request_id: str, detail: str) -> bool:
        """End a sequence between two steps, keeping its window state; False when it does not run."""

        def leave() -> bool:
            generation = self._running.get(request_id)
            if generation is None:
                return False
            self._sink([self._end(generation, FinishReason.FINISH_REASON_CANCELLED, detail)])
            return True

        return await self._thread.call(leave)

    async def restore(self, state: SequenceState, record: bytes) -> None:
        """Bring a sequence's window state into its slot."""
        await self._thread.call(lambda: self._memory.restore(state, record))

    def step(self) -> bool:
        """One forward for all running sequences; whether any are left. Engine thread only."""
        batch = list(self._running.values())
        if not batch:
            return False
        before = [generation.state.length for generation in batch]
        told = self._run(batch)
        self.steps += 1
        self.largest_batch = max(self.largest_batch, len(batch))
        events: list[Event] = []
        try:
            for generation, begin, tokens in zip(batch, before, told, strict=True):
                for length, sampled in enumerate(tokens, begin + 1):
                    events += self._sealed(generation, length)
                    if sampled is None:
                        events.append(self._fail(generation, "the network gave logits that are not finite"))
                    else:
                        events += self._advance(generation, sampled)
        finally:
            self._sink(events)  # what has happened is told, also when a bug ends the step
        return bool(self._running)

    async def discard(self, request_id: str) -> None:
        """Forget a sequence, without an event."""
        await self._thread.call(lambda: self._running.pop(request_id, None))

    async def shut(self) -> None:
        """Forget every sequence, without events, and take no more: their owner lets go of them."""
        await self._thread.call(self.close)

    def close(self) -> None:
        """The same, on the engine's thread."""
        self._closed = True
        self._running.clear()

    def _run(self, batch: Sequence[Generation]) -> list[list[SampledToken | None]]:
        """One forward: the next tokens of each sequence, at least one; None where logits are not finite."""
        from cedar.model.verification import rows_kept

        network, kv = self._memory.network, self._memory.kv
        states = [generation.state for generation in batch]
        proposed = self._propose(batch)
        if not any(proposed):
            return [
                [sampled] for sampled in self._sample(batch, [1] * len(batch), network.decode(kv, states))
            ]
        verification = network.verify(kv, states, proposed)
        sampled = self._sample(batch, [len(rows) for rows in verification.rows], verification.logits)
        told = []
        for generation, tokens, rows in zip(batch, proposed, verification.rows, strict=True):
            whole = self._until_end(generation, sampled[rows.start : rows.stop])
            told.append(whole[: rows_kept(tokens, [-1 if s is None else s.id for s in whole])])
        verification.commit([len(tokens) for tokens in told])
        self.draft_proposed += sum(map(len, proposed))
        self.draft_accepted += sum(len(tokens) - 1 for tokens in told)
        return told

    def _propose(self, batch: Sequence[Generation]) -> list[list[int]]:
        """Tokens to verify beside each sequence's last one; none where nothing more could come of it."""
        proposed: list[list[int]] = [[] for _ in batch]
        if not self._drafting:
            return proposed
        rooms = [
            draft_room(
                index=generation.index,
                length=generation.state.length,
                max_tokens=generation.max_tokens,
                context=self._memory.model.context,
            )
            for generation in batch
        ]
        wanted = [row for row, room in enumerate(rooms) if room > 0]
        if wanted:
            proposals = self._memory.network.propose(self._memory.kv, [batch[row].state for row in wanted])
            chosen = proposals.chosen([rooms[row] for row in wanted], self._draft_confidence)
            for row, tokens in zip(wanted, chosen, strict=True):
                proposed[row] = tokens
        return proposed

    def _until_end(
        self, generation: Generation, sampled: Sequence[SampledToken | None]
    ) -> list[SampledToken | None]:
        """Up to the first token that ends the stream, or that could not be sampled."""
        position = len(generation.state.ids)
        for row, token in enumerate(sampled):
            if token is None or self._reason(generation, token, generation.index + 1 + row, position + row):
                return list(sampled[: row + 1])
        return list(sampled)

    def _sample(
        self, batch: Sequence[Generation], rows: Sequence[int], logits: object
    ) -> list[SampledToken | None]:
        """A token for each row of logits, ``rows`` of them for each sequence, at consecutive positions."""
        import torch
        from cedar.model.prompt_errors import LogitsError
        from cedar.model.sampling import sample_batch

        assert isinstance(logits, torch.Tensor)
        params = [g.sampling for g, count in zip(batch, rows, strict=True) for _ in range(count)]
        positions = [
            len(g.state.ids) + row for g, count in zip(batch, rows, strict=True) for row in range(count)
        ]
        try:
            return list(sample_batch(logits, params, positions))
        except LogitsError as error:
            good = [row for row in range(len(params)) if row not in error.rows]
            result: list[SampledToken | None] = [None] * len(params)
            if good:
                some = sample_batch(logits[good], [params[r] for r in good], [positions[r] for r in good])
                for row, sampled in zip(good, some, strict=True):
                    result[row] = sampled
            return result

    def _advance(self, generation: Generation, sampled: SampledToken) -> list[Event]:
        state = generation.state
        position = len(state.ids)
        state.ids.append(sampled.id)
        generation.index += 1
        self.tokens += 1
        events: list[Event] = [TokenOut(generation.request_id, stage_token(generation.index, sampled))]
        reason = self._reason(generation, sampled, generation.index, position)
        if reason is not None:
            events.append(self._end(generation, reason, ""))
        return events

    def _reason(
        self, generation: Generation, sampled: SampledToken, index: int, position: int
    ) -> FinishReason | None:
        """Whether the stream ends with this token, number ``index``, at ``position``."""
        return finish_reason(
            sampled.id,
            index=index,
            position=position,
            max_tokens=generation.max_tokens,
            stop_ids=generation.sampling.stop_ids,
            ignore_eos=generation.sampling.ignore_eos,
            model=self._memory.model,
        )

    def _sealed(self, generation: Generation, length: int) -> list[PageSealed]:
        """The page that is complete at ``length`` tokens, if one is."""
        state, page_tokens = generation.state, self._memory.model.page_tokens
        if length % page_tokens:
            return []
        page = length // page_tokens - 1
        ids = tuple(state.ids[page * page_tokens : length])
        return [PageSealed(generation.request_id, page, ids, self._memory.pages.read(state.pages[page]))]

    def _end(self, generation: Generation, reason: FinishReason, detail: str) -> Ended:
        state = generation.state
        record = self._memory.export(state)
        del self._running[generation.request_id]
        return Ended(generation.request_id, reason, detail, tuple(state.ids), state.length, record)

    def _fail(self, generation: Generation, detail: str) -> Ended:
        del self._running[generation.request_id]
        state = generation.state
        failed = FinishReason.FINISH_REASON_FAILED
        return Ended(generation.request_id, failed, detail, tuple(state.ids), state.length, None)
