"""Room and compute of a Prefill worker: leases of pages and slots, and the network on its own thread.

The loop's thread owns the books (pages, slots, the queue); the engine's thread runs what it is given. Prompts
are admitted and computed first come, first served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cedar.actors import scheduler
from cedar.actors.admission import AdmissionQueue
from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import Busy, Corrupt, InvalidRequest
from cedar.actors.network_memory import NetworkMemory
from cedar.actors.pool import PagePool, PageRef, SlotPool, SlotRef
from cedar.actors.scheduler import HitPlan, Prefix

if TYPE_CHECKING:
    from cedar.model.sampling import SampledToken, SamplingParams
    from cedar.model.state import ImageSpan, SequenceState
    from torch import Tensor


@dataclass
class Lease:
    """One prompt's pages and slot. ``sealed[i]``: page i is complete, and must not be written."""

    plan: HitPlan
    pages: list[PageRef]
    sealed: list[bool]
    slot: SlotRef
    released: bool = field(default=False)


class PrefillEngine:
    """The pools of one memory, and the calls that run the network on it."""

    def __init__(
        self, memory: NetworkMemory, thread: EngineThread, *, max_queue: int, retry_after_ms: int
    ) -> None:
        self.memory = memory
        self.pages = PagePool(int(memory.kv.pages.shape[0]))
        self.slots = SlotPool(int(memory.kv.rings.shape[0]))
        self.waiting: AdmissionQueue[Lease] = AdmissionQueue(max_queue, self.release, retry_after_ms)
        self.turn = asyncio.Lock()
        self._thread = thread
        self._retry_after_ms = retry_after_ms

    async def admit(
        self,
        keys: Sequence[bytes],
        total: int,
        *,
        promised: int,
        record: int | None,
        first_start: int | None,
        timeout_s: float,
    ) -> Lease:
        """Pages and a slot for a prompt of ``total`` tokens, all or nothing, in order of arrival.

        Hit pages that are here already are shared. See ``scheduler.plan_hits`` for the other arguments.
        """
        model = self.memory.model
        needed = scheduler.pages_for(total, model.page_tokens)
        if needed > self.pages.total:
            limit = f"at most {self.pages.total * model.page_tokens}, the memory of this worker"
            raise InvalidRequest("token_ids", f"{total} tokens", limit)

        def attempt() -> Lease | None:
            local = self.pages.leading(keys)
            plan = scheduler.plan_hits(
                model, total, local=local, promised=promised, record=record, first_start=first_start
            )
            if self.slots.leased == self.slots.total:
                return None
            fresh: list[bytes | None] = [None] * (needed - plan.local)
            leases = self.pages.reserve([*keys[: plan.local], *fresh])
            slot = self.slots.reserve() if leases is not None else None
            if leases is None or slot is None:
                return None
            return Lease(plan, [lease.ref for lease in leases], [lease.held for lease in leases], slot)

        return await self.waiting.reserve(attempt, timeout_s)

    def release(self, lease: Lease) -> None:
        """Give everything back, once; whoever waits is admitted."""
        if lease.released:
            return
        lease.released = True
        self.pages.release(lease.pages)
        self.slots.release(lease.slot)
        self.waiting.pump()

    def load(self, lease: Lease, index: int, key: bytes, payload: memoryview) -> None:
        """Put a page that came from the store into its slot."""
        self.pages.check(lease.pages[index])
        self.memory.pages.write(lease.pages[index].slot, payload)
        self.seal(lease, index, key)

    def seal(self, lease: Lease, index: int, key: bytes) -> None:
        """Page ``index`` is complete: it stays here under its key when the lease ends."""
        self.pages.seal(lease.pages[index], key)
        lease.sealed[index] = True

    def rewrite(self, lease: Lease, pages: int) -> None:
        """Fresh slots for sealed pages from ``pages`` on, which the prompt will compute itself after all."""
        stale = [index for index in range(pages, len(lease.pages)) if lease.sealed[index]]
        if not stale:
            return
        self.pages.release([lease.pages[index] for index in stale])
        fresh = self.pages.reserve([None] * len(stale))
        if fresh is None:
            lease.pages = [ref for index, ref in enumerate(lease.pages) if index not in set(stale)]
            raise Busy("no room to compute pages that were lost", retry_after_ms=self._retry_after_ms)
        for index, taken in zip(stale, fresh, strict=True):
            lease.pages[index], lease.sealed[index] = taken.ref, False

    async def begin(
        self,
        lease: Lease,
        prefix: Prefix,
        ids: list[int],
        images: tuple[ImageSpan, ...],
        record: bytes | None,
    ) -> SequenceState:
        """The sequence, ready for its first chunk; its window state restored from ``record`` if given."""
        from cedar.model.state import SequenceState

        state = SequenceState(
            slot=lease.slot.slot,
            pages=[ref.slot for ref in lease.pages],
            ids=ids,
            images=images,
            length=prefix.start,
            encoder_start=prefix.start,
            write_from=prefix.pages * self.memory.model.page_tokens,
        )
        if record is not None:
            await self._thread.call(lambda: self.memory.restore(state, record))
        return state

    async def chunk(
        self,
        state: SequenceState,
        upto: int,
        features: Mapping[bytes, Tensor],
        decoder_from: int | None,
    ) -> None:
        """Run the tokens up to position ``upto``."""
        network, kv = self.memory.network, self.memory.kv
        await self._thread.call(
            lambda: network.prefill(kv, state, upto, features, replay=True, decoder_from=decoder_from)
        )

    async def finish(
        self, state: SequenceState, sampling: SamplingParams, origin: int
    ) -> tuple[SampledToken, bytes]:
        """Run the decoder; the next token and the window record. Corrupt when the logits are not finite."""

        def run() -> tuple[SampledToken, bytes]:
            from cedar.model.prompt_errors import LogitsError
            from cedar.model.sampling import sample

            logits = self.memory.network.finish_prefill(self.memory.kv, state)
            state.encoder_start = origin  # no window reaches back to the run's own start any more
            try:
                token = sample(logits, sampling, len(state.ids))
            except LogitsError as error:
                raise Corrupt(f"the network gave {error}") from None
            return token, self.memory.export(state)

        return await self._thread.call(run)
