"""One handoff on the Decode side: room first, then verified pages and state, then running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from cedar.actors import scheduler
from cedar.actors.decode_engine import Ended, Generation
from cedar.actors.decode_requests import DecodeRequest
from cedar.actors.errors import (
    Cancelled,
    Corrupt,
    DeadlinePassed,
    InvalidRequest,
    Mismatch,
    StageError,
    Unavailable,
)
from cedar.actors.handoff import STATE_GROUPS, Assembly
from cedar.actors.sampling import model_sampling
from cedar.actors.status import as_stage_error
from cedar.actors.store_writer import Receipt
from cedar.actors.token_log import TokenLog
from cedar.actors.wire_prompt import WirePrompt
from cedar.kvstore.frames import Frame, FrameKind, decode_frame, encode_frame
from cedar.kvstore.header import FLAG_AFTER_REPLAY, HEADER_BYTES, open_value, read_header
from cedar.v1.common_pb2 import FinishReason, TokenEvent
from cedar.v1.stages_pb2 import (
    FirstToken,
    HandoffDone,
    HandoffFailed,
    HandoffHeader,
    HandoffReply,
    StreamEnd,
)

if TYPE_CHECKING:
    from cedar.actors.decode_worker import DecodeWorker
    from cedar.model.sampling import SamplingParams
    from cedar.model.state import SequenceState


class _Incoming:
    """The peer's frames. Every wait ends: with a frame, the peer's end, ``idle_s``, or ``stopped``."""

    def __init__(self, messages: AsyncIterator[bytes], idle_s: float) -> None:
        self._messages = messages
        self._idle_s = idle_s

    async def next(self, stopped: asyncio.Future[StageError] | None = None) -> Frame:
        """The next frame. Unavailable when the stream ends, DeadlinePassed when nothing comes."""
        arriving = asyncio.ensure_future(anext(self._messages, None))
        waits: list[asyncio.Future[object]] = [arriving, *([stopped] if stopped else [])]  # type: ignore[list-item]
        try:
            await asyncio.wait(waits, timeout=self._idle_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not arriving.done():
                arriving.cancel()
                await asyncio.wait([arriving])
        if stopped is not None and stopped.done():
            raise stopped.result()
        if arriving.cancelled():
            raise DeadlinePassed(f"prefill sent nothing for {self._idle_s:g} s")
        message = arriving.result()
        if message is None:
            raise Unavailable("prefill broke the handoff off")
        return decode_frame(message)


async def receive_handoff(worker: DecodeWorker, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Answers to one handoff. Whatever ends it before HandoffDone is delivered frees what it reserved."""
    incoming = _Incoming(messages, worker.config.handoff_idle_s)
    first = await incoming.next()
    if first.kind != FrameKind.HANDOFF_HEADER:
        raise InvalidRequest("frame kind", first.kind, "a handoff begins with its header")
    header = HandoffHeader.FromString(first.meta)
    prompt, sampling = _check(worker, header)
    request = _reserve(worker, header, prompt)
    if isinstance(request, HandoffReply):
        worker.counters["handoffs_refused"] += 1
        yield encode_frame(FrameKind.HANDOFF_REPLY, request)
        return
    done = False
    try:
        yield encode_frame(
            FrameKind.HANDOFF_REPLY, HandoffReply(accepted=True, missing_pages=request.missing)
        )
        assembly = Assembly(
            request.missing,
            len(prompt.ids),
            HEADER_BYTES + worker.memory.pages.page_bytes,
            worker.memory.state_limit_bytes,
        )
        token = await _receive(worker, incoming, request, assembly)
        await _enter(worker, request, prompt, sampling, assembly.record(), token)
        yield encode_frame(FrameKind.HANDOFF_DONE, HandoffDone(pages_received=assembly.received))
        done = True
        worker.counters["handoffs_done"] += 1
        worker.counters["pages_received"] += assembly.received
        worker.counters["pages_shared"] += len(prompt.keys) - len(request.missing)
    except BaseException as error:
        await _let_go(worker, request, error)
        raise
    finally:
        request.handing_over = False
        request.log.touch()
        if not done:
            worker.counters["handoffs_broken"] += 1


def _check(worker: DecodeWorker, header: HandoffHeader) -> tuple[WirePrompt, SamplingParams]:
    network = worker.memory.network
    if header.decode_incarnation != worker.incarnation:
        raise Mismatch(
            f"decode_incarnation={header.decode_incarnation:x}: this process is {worker.incarnation:x}"
        )
    if header.fingerprint != network.fingerprint:
        raise Mismatch(
            f"fingerprint={header.fingerprint.hex()[:16]}: this worker runs {network.fingerprint.hex()[:16]}"
        )
    if tuple(header.state_groups) != STATE_GROUPS:
        raise Mismatch(f"state_groups={list(header.state_groups)}: this worker needs {list(STATE_GROUPS)}")
    if not header.request_id:
        raise InvalidRequest("request_id", "", "must not be empty")
    prompt = WirePrompt.parse(
        network.config,
        worker.memory.model.page_tokens,
        token_ids=header.token_ids,
        images=header.images,
        root_key=header.root_key,
        page_keys=header.page_keys,
        prompt_tokens=header.prompt_tokens,
    )
    return prompt, model_sampling(header.sampling, network.config.vocab_size)


def _reserve(worker: DecodeWorker, header: HandoffHeader, prompt: WirePrompt) -> DecodeRequest | HandoffReply:
    """All the memory the request can ever need, or a refusal: nothing runs out later."""
    worker.table.check_new(header.request_id)
    model = worker.memory.model
    positions = scheduler.decode_positions(
        len(prompt.ids), prompt.generated, header.sampling.max_tokens, model.context
    )
    needed = scheduler.pages_for(positions, model.page_tokens)
    if needed > worker.pages.total:
        limit = f"at most {worker.pages.total * model.page_tokens}, the memory of this worker"
        raise InvalidRequest("token_ids + max_tokens", f"{positions} tokens", limit)
    slot = worker.slots.reserve()
    leases = worker.pages.reserve([*prompt.keys, *[None] * (needed - len(prompt.keys))]) if slot else None
    if slot is None or leases is None:
        if slot is not None:
            worker.slots.release(slot)
        short = "every sequence slot is in use" if slot is None else f"{needed} pages are not free"
        return HandoffReply(accepted=False, refusal=short, retry_after_ms=worker.config.retry_after_ms)
    request = DecodeRequest(
        request_id=header.request_id,
        log=TokenLog(prompt.generated, worker.table.clock),
        root=prompt.root,
        keys=list(prompt.keys),
        images=prompt.images,
        pages=[lease.ref for lease in leases],
        missing=[i for i, lease in enumerate(leases[: len(prompt.keys)]) if not lease.held],
        slot=slot,
        receipt=Receipt(tenant=header.tenant),
        begun=worker.table.clock(),
    )
    worker.table.add(request)
    return request


async def _receive(
    worker: DecodeWorker, incoming: _Incoming, request: DecodeRequest, assembly: Assembly
) -> TokenEvent:
    """Take pages and state until the first token comes."""
    memory = worker.memory
    while True:
        frame = await incoming.next(request.stopped)
        if frame.kind == FrameKind.HANDOFF_PAGES:
            for index, value in assembly.pages(frame):
                payload = open_value(
                    value,
                    page_key=request.keys[index],
                    fingerprint=memory.network.fingerprint,
                    tokens=memory.model.page_tokens,
                    payload_bytes=memory.pages.page_bytes,
                )
                worker.pages.check(request.pages[index])
                memory.pages.write(request.pages[index].slot, payload)
                replayed = read_header(value).flags & FLAG_AFTER_REPLAY
                if worker.config.share_replayed_pages or not replayed:
                    worker.pages.seal(request.pages[index], request.keys[index])
        elif frame.kind == FrameKind.HANDOFF_STATE:
            assembly.state(frame)
        elif frame.kind == FrameKind.HANDOFF_TOKEN:
            return FirstToken.FromString(frame.meta).token
        elif frame.kind == FrameKind.HANDOFF_FAILED:
            reason = HandoffFailed.FromString(frame.meta).reason
            raise Unavailable(f"prefill failed: {reason}")
        else:
            raise Corrupt(f"frame kind {frame.kind} inside a handoff")


async def _enter(
    worker: DecodeWorker,
    request: DecodeRequest,
    prompt: WirePrompt,
    sampling: SamplingParams,
    record: bytes,
    token: TokenEvent,
) -> None:
    """Restore the state, log the first token, and run (or end, if that token ends the request)."""
    memory, config = worker.memory, worker.memory.network.config
    if token.index != prompt.generated or token.id >= config.vocab_size:
        raise Corrupt(f"first token {token.id} with index {token.index}: expected index {prompt.generated}")
    window = memory.record_header(record)
    if window is None or window.length != len(prompt.ids):
        raise Corrupt("the state record is not of this model and sequence")
    state = _sequence(request, prompt)
    await worker.engine.restore(state, record)
    request.begun = worker.table.clock()
    request.after_replay = window.encoder_start > 0
    position = len(state.ids)
    state.ids.append(token.id)
    worker.counters["tokens"] += 1
    request.log.append(token)
    reason = scheduler.finish_reason(
        token.id,
        index=token.index,
        position=position,
        max_tokens=sampling.max_tokens or 1,
        stop_ids=sampling.stop_ids,
        ignore_eos=sampling.ignore_eos,
        model=memory.model,
    )
    if request.stopped.done():
        raise request.stopped.result()
    if reason is None:
        request.in_engine = True
        generation = Generation(request.request_id, state, sampling, sampling.max_tokens or 1, token.index)
        await worker.engine.add(generation)
    else:
        worker.free(request)
        worker.events.ended(
            request, Ended(request.request_id, reason, "", tuple(state.ids), state.length, record)
        )


def _sequence(request: DecodeRequest, prompt: WirePrompt) -> SequenceState:
    from cedar.model.state import SequenceState

    pages = [ref.slot for ref in request.pages]
    return SequenceState(slot=request.slot.slot, pages=pages, ids=list(prompt.ids), images=prompt.images)


async def _let_go(worker: DecodeWorker, request: DecodeRequest, error: BaseException) -> None:
    """Free a request whose handoff broke; whoever reads its stream hears why, and tries elsewhere."""
    known = as_stage_error(error) if isinstance(error, Exception) else None
    if isinstance(known, Cancelled):
        end: StreamEnd | StageError = StreamEnd(
            reason=FinishReason.FINISH_REASON_CANCELLED, tokens=request.log.next_index, detail=str(known)
        )
    else:
        end = Unavailable(f"handoff failed: {known or 'the stream broke'}")
    await worker.let_go(request, end)
