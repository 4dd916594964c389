"""One prompt through a Prefill worker, from admission to the handoff's end (design, section 3).

    room here -> room at Decode -> hit pages and window record -> features -> chunks -> decoder -> handoff

Each step that takes something is inside the block that gives it back, so every way out frees everything.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cedar.actors import scheduler
from cedar.actors.channels import Channels
from cedar.actors.config import PrefillConfig
from cedar.actors.errors import Corrupt, InvalidRequest, NotFound
from cedar.actors.features import fetch_features
from cedar.actors.handoff import STATE_GROUPS
from cedar.actors.handoff_stream import HandoffStream
from cedar.actors.network_memory import WindowState
from cedar.actors.prefill_engine import Lease, PrefillEngine
from cedar.actors.sampling import model_sampling, stage_token
from cedar.actors.scheduler import Prefix
from cedar.actors.store_link import StoreLink
from cedar.actors.store_writer import Receipt
from cedar.actors.wire_prompt import WirePrompt
from cedar.kvstore.header import FLAG_AFTER_REPLAY, seal_value
from cedar.kvstore.window_match import window_digest
from cedar.v1.common_pb2 import Traffic
from cedar.v1.stages_pb2 import HandoffHeader, PrefillAdmitted, PrefillDone, PrefillEvent, PrefillRequest

if TYPE_CHECKING:
    from cedar.model.state import SequenceState
    from torch import Tensor


@dataclass(frozen=True)
class PrefillParts:
    """What the runs of one worker share."""

    engine: PrefillEngine
    store: StoreLink
    counters: Counter[str]
    channels: Channels
    config: PrefillConfig


class PrefillRun:
    """The state of one prompt on its way through."""

    def __init__(self, parts: PrefillParts, request: PrefillRequest, deadline: float | None) -> None:
        self._parts = parts
        self._request = request
        self._deadline = deadline
        engine = parts.engine
        config = engine.memory.network.config
        self._prompt = WirePrompt.parse(
            config,
            engine.memory.model.page_tokens,
            token_ids=request.token_ids,
            images=request.images,
            root_key=request.root_key,
            page_keys=request.page_keys,
            prompt_tokens=request.prompt_tokens,
        )
        self._sampling = model_sampling(request.sampling, config.vocab_size)
        if self._prompt.generated >= request.sampling.max_tokens:
            raise InvalidRequest(
                "sampling.max_tokens",
                request.sampling.max_tokens,
                f"above the {self._prompt.generated} generated",
            )
        self._check_references()
        resumed = self._prompt.generated > 0
        self._first_start = request.encoder_start if resumed else None
        self._decoder_start = self._resumed_decoder_start() if resumed else 0
        self._features = {source.content_hash: source.encoder_address for source in request.features}
        self._receipt = Receipt(tenant=request.tenant)
        self._traffic = Traffic()
        self._queue_s = self._compute_s = self._handoff_s = 0.0

    async def events(self) -> AsyncGenerator[PrefillEvent]:
        """PrefillAdmitted once the hit pages have been read, PrefillDone at the end."""
        parts, request = self._parts, self._request
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(parts.channels.to(request.decode_address))
            handoff = await stack.enter_async_context(
                HandoffStream(
                    channel, patience_s=parts.config.handoff_timeout_s, heartbeat_s=parts.config.heartbeat_s
                )
            )
            lease = await self._admit()
            try:
                await handoff.open(self._header(), self._time_left())
                prefix, state = await self._prepare(lease)
                sources = scheduler.sources(parts.engine.memory.model, len(self._prompt.ids), prefix)
                features = await self._fetch_features(prefix)
                admitted = PrefillAdmitted(
                    sources=sources, encoder_start=prefix.origin, decoder_start=self._decoder_start
                )
                yield PrefillEvent(admitted=admitted)
                await self._compute(lease, prefix, state, features, handoff)
            finally:
                handoff.stop_sending()
                parts.engine.release(lease)
        await self._receipt.wait(parts.config.store_wait_s)
        self._traffic.pages_stored = self._receipt.stored
        yield PrefillEvent(
            done=PrefillDone(
                traffic=self._traffic,
                queue_s=self._queue_s,
                compute_s=self._compute_s,
                handoff_s=self._handoff_s,
            )
        )

    def _check_references(self) -> None:
        request, prompt = self._request, self._prompt
        for field in ("request_id", "decode_address"):
            if not getattr(request, field):
                raise InvalidRequest(field, "", "must not be empty")
        if request.HasField("window"):
            tokens = request.window.tokens
            if not 0 < tokens < len(prompt.ids):
                raise InvalidRequest(
                    "window.tokens", tokens, f"above 0 and below {len(prompt.ids)} token ids"
                )
            page_tokens = self._parts.engine.memory.model.page_tokens
            named = window_digest(prompt.root, prompt.keys, prompt.ids, prompt.images, page_tokens, tokens)
            if named != (request.window.page_key, request.window.digest):
                raise InvalidRequest(
                    "window", f"at {tokens} tokens", "the name of a state of these token_ids"
                )

    async def _admit(self) -> Lease:
        begun = time.monotonic()
        request = self._request
        lease = await self._parts.engine.admit(
            self._prompt.keys,
            len(self._prompt.ids),
            promised=request.hit_pages,
            record=request.window.tokens if request.HasField("window") else None,
            first_start=self._first_start,
            timeout_s=self._parts.config.queue_timeout_s,
        )
        self._queue_s += time.monotonic() - begun
        return lease

    def _header(self) -> HandoffHeader:
        request = self._request
        return HandoffHeader(
            request_id=request.request_id,
            decode_incarnation=request.decode_incarnation,
            fingerprint=self._parts.engine.memory.network.fingerprint,
            state_groups=STATE_GROUPS,
            token_ids=request.token_ids,
            images=request.images,
            sampling=request.sampling,
            root_key=request.root_key,
            page_keys=request.page_keys,
            prompt_tokens=self._prompt.prompt_tokens,
            tenant=request.tenant,
        )

    async def _prepare(self, lease: Lease) -> tuple[Prefix, SequenceState]:
        """Read what is of use, and bring the sequence to where the prefill starts.

        A window record that is missing or does not fit is a miss: the prefill replays instead.
        """
        engine, prompt = self._parts.engine, self._prompt
        window = asyncio.create_task(self._read_window()) if lease.plan.record else None
        try:
            arrived = await self._read_pages(lease)
            record = await window if window is not None else None
        finally:
            if window is not None:
                window.cancel()
        prefix = self._settle(lease, arrived, record)
        if record is not None and prefix.restored:
            try:
                return prefix, await engine.begin(lease, prefix, prompt.ids, prompt.images, record.data)
            except Corrupt:
                self._parts.counters["window_records_corrupt"] += 1
                prefix = self._settle(lease, arrived, None)
        return prefix, await engine.begin(lease, prefix, prompt.ids, prompt.images, None)

    def _settle(self, lease: Lease, arrived: int, record: WindowState | None) -> Prefix:
        prefix = scheduler.settle(
            self._parts.engine.memory.model,
            len(self._prompt.ids),
            self._decoder_start,
            lease.plan,
            arrived=arrived,
            record=None if record is None else record.length,
            record_origin=0 if record is None else record.encoder_start,
            first_start=self._first_start,
        )
        self._parts.engine.rewrite(lease, prefix.pages)
        if self._first_start is None:
            restored = record if prefix.restored else None
            self._decoder_start = scheduler.decoder_start(
                self._parts.engine.memory.model,
                len(self._prompt.ids),
                record=None if restored is None else restored.length,
                record_start=0 if restored is None else restored.decoder_start,
            )
        return prefix

    def _resumed_decoder_start(self) -> int:
        request, prompt = self._request, self._prompt.prompt_tokens
        if not request.HasField("decoder_start"):
            return scheduler.decoder_start(self._parts.engine.memory.model, prompt, record=None)
        if request.decoder_start >= prompt:
            raise InvalidRequest(
                "decoder_start", request.decoder_start, f"below the prompt of {prompt} tokens"
            )
        return request.decoder_start

    async def _read_pages(self, lease: Lease) -> int:
        """Leading pages that are in memory and verified."""
        plan, keys = lease.plan, self._prompt.keys
        arrived = plan.local
        if plan.stored:
            wanted = keys[plan.local : plan.pages]
            async for index, payload in self._parts.store.pages(wanted):
                self._parts.engine.load(lease, plan.local + index, wanted[index], payload)
                arrived = plan.local + index + 1
        return arrived

    async def _read_window(self) -> WindowState | None:
        """The window record on offer, if it is what its name says."""
        data = await self._parts.store.window(self._request.window, self._request.tenant)
        if data is None:
            return None
        state = self._parts.engine.memory.record_header(data)
        return state if state is not None and state.length == self._request.window.tokens else None

    async def _fetch_features(self, prefix: Prefix) -> Mapping[bytes, Tensor]:
        """Features of the images that are not wholly inside what is skipped."""
        import torch

        width = self._parts.engine.memory.network.config.hidden_size
        features: dict[bytes, Tensor] = {}
        for image in self._prompt.images:
            if image.end <= prefix.start or image.content_hash in features:
                continue
            address = self._features.get(image.content_hash)
            if not address:
                # Fewer pages arrived than were promised, or the run must begin further ahead.
                name = image.content_hash.hex()[:16]
                raise NotFound(f"no encoder was named for image {name}, which must be run", stage="encoder")
            data = await fetch_features(
                self._parts.channels,
                address,
                image.content_hash,
                tenant=self._request.tenant,
                rows=image.length,
                width=width,
                timeout_s=self._parts.config.features_timeout_s,
            )
            self._traffic.feature_bytes_sent += len(data)
            rows = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(image.length, width)
            features[image.content_hash] = rows.to(self._parts.engine.memory.network.device)
        return features

    async def _compute(
        self,
        lease: Lease,
        prefix: Prefix,
        state: SequenceState,
        features: Mapping[bytes, Tensor],
        handoff: HandoffStream,
    ) -> None:
        """The prompt's turn on the network, each page offered as it is sealed; then the handoff's end."""
        engine, prompt = self._parts.engine, self._prompt
        model = engine.memory.model
        waiting = time.monotonic()
        async with engine.turn:
            begun = time.monotonic()
            self._queue_s += begun - waiting
            self._traffic.pages_hit = prefix.pages
            for index in range(prefix.pages):
                self._offer(lease, prefix, index, handoff)
            decoder_from = self._decoder_start if prompt.generated else None
            chunk_tokens = self._parts.config.chunk_pages * model.page_tokens
            shared = self._parts.config.share_replayed_pages or not prefix.after_replay
            sealed = max(prefix.pages, state.length // model.page_tokens)
            while state.length < len(prompt.ids):
                handoff.check()
                upto = scheduler.chunk_end(state.length, len(prompt.ids), chunk_tokens)
                await engine.chunk(state, upto, features, decoder_from)
                for index in range(sealed, state.length // model.page_tokens):
                    self._traffic.pages_sealed += 1
                    if shared:
                        engine.seal(lease, index, prompt.keys[index])
                    self._offer(lease, prefix, index, handoff)
                    if shared:
                        self._store(lease, prefix, index)
                    sealed = index + 1
            first, window = await engine.finish(state, self._sampling, prefix.origin)
        ended = time.monotonic()
        self._compute_s = ended - begun
        await handoff.finish(window, len(prompt.ids), stage_token(prompt.generated, first))
        self._handoff_s = time.monotonic() - ended
        self._traffic.pages_sent = handoff.pages_sent
        self._traffic.page_bytes_sent = handoff.page_bytes_sent
        self._traffic.state_bytes_sent = handoff.state_bytes_sent

    def _offer(self, lease: Lease, prefix: Prefix, index: int, handoff: HandoffStream) -> None:
        handoff.offer(index, lambda: self._value(lease, prefix, index))

    def _store(self, lease: Lease, prefix: Prefix, index: int) -> None:
        if self._parts.store.connected:
            value = self._value(lease, prefix, index)
            self._parts.store.writer.put_page(index, self._prompt.keys[index], value, self._receipt)

    def _value(self, lease: Lease, prefix: Prefix, index: int) -> bytes:
        """The stored value of a page of this prompt."""
        engine = self._parts.engine
        engine.pages.check(lease.pages[index])
        return seal_value(
            engine.memory.pages.read(lease.pages[index].slot),
            fingerprint=engine.memory.network.fingerprint,
            page_key=self._prompt.keys[index],
            tokens=engine.memory.model.page_tokens,
            flags=FLAG_AFTER_REPLAY if prefix.after_replay and index >= prefix.pages else 0,
        )

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
