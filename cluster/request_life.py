"""One request, from page keys to its last token, through as many attempts as it takes.

1. Ask the store which leading pages and which window record it has.
2. Encode the images whose features will be read; pick a Prefill and a Decode worker.
3. Prefill; when it says *admitted*, stream from Decode.
4. A failure goes to the retry table. When Decode died after tokens were streamed, prompt and tokens so
   far are submitted again; draws are keyed by (seed, position), so the stream goes on as it would have.
5. Whatever happens, every attempt ends with the Prefill call cancelled and the Decode request freed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc
from cedar.cluster.cleanup import to_the_end
from cedar.cluster.config import DeadlineSettings
from cedar.cluster.directory import Worker
from cedar.cluster.ending import ended
from cedar.cluster.errors import NoWorker
from cedar.cluster.fleet import Fleet
from cedar.cluster.hits import Hit, first_computed, images_needed, pack_ids, pages_needed, resumed_hit
from cedar.cluster.recovery import Recovery, RequestFailed
from cedar.cluster.stage_calls import PrefillCall, StageFailure, broken, cancel_decode, decode_stream, encode
from cedar.cluster.usage import Account
from cedar.kvstore.keys import chain_keys
from cedar.v1 import common_pb2 as common
from cedar.v1 import stages_pb2 as pb
from grpc import StatusCode

PREFILL_DONE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done. ``files``: image files by content hash. ``root``: 32 bytes, the tenant's.

    ``deadline_s``: on the loop's clock. ``sampling.max_tokens`` is set.
    """

    request_id: str
    ids: Sequence[int]
    images: Sequence[common.ImageSpan]
    files: Mapping[bytes, bytes]
    root: bytes
    tenant: bytes
    sampling: common.SamplingParams
    fingerprint: bytes
    page_tokens: int
    window_tokens: int
    end_token: int
    deadline_s: float


class Listener(Protocol):
    """What a request tells its client, in order."""

    async def started(self, sources: common.PromptSources) -> None:
        """Once, when the prompt is admitted for the first time."""

    async def token(self, token: common.TokenEvent) -> bool:
        """Each token once. False: the client has enough (a stop string matched)."""


LookUp = Callable[[Sequence[bytes]], Awaitable[Hit]]


class RequestLife:
    """Runs one ``Job``; a cancelled ``run()`` frees everything before it returns.

    ``look_up``: page keys to hit, never raises. ``account`` is filled on the way.
    """

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        look_up: LookUp,
        deadlines: DeadlineSettings,
        recovery: Recovery,
        account: Account,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._look_up = look_up
        self._deadlines = deadlines
        self._recovery = recovery
        self._account = account
        self._hit = Hit()
        self._encoder_start = self._decoder_start = 0
        # Ids are a tenant's own, and a client may use one again: in the stages they must not meet.
        self._stage_id = f"{job.request_id}@{secrets.token_hex(6)}"
        self._tries = 0
        self.generated: list[int] = []

    async def run(self, listener: Listener) -> common.FinishReason:
        """Serve it. Returns why it ended; raises ``RequestFailed``."""
        job = self._job
        keys = chain_keys(job.root, job.ids, job.images, job.page_tokens)
        while True:
            self._recovery.remaining_s()
            if not self.generated:  # a failed attempt may have stored pages
                self._hit = await self._look_up(keys)
            try:
                return await self._attempt(listener)
            except StageFailure as failure:
                reason = ended(self.generated, job.sampling, job.end_token)
                if reason is not None:
                    return reason
                self._recovery.failed(failure, streamed=bool(self.generated))
            except NoWorker as error:
                await self._recovery.no_worker(error)

    async def _attempt(self, listener: Listener) -> common.FinishReason:
        job = self._job
        ids = [*job.ids, *self.generated]
        keys = chain_keys(job.root, ids, job.images, job.page_tokens)
        features = await self._encode()
        avoid = self._recovery.avoid
        prefill = self._fleet.pick("prefill", keys, avoid, job.fingerprint)
        needed = pages_needed(len(job.ids), job.sampling.max_tokens, job.page_tokens)
        decode = self._fleet.pick("decode", keys, avoid, job.fingerprint, needed)
        self._recovery.asked(prefill, decode)
        request = self._request(ids, keys, decode, features)
        to_decode = self._fleet.channel(decode)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._fleet.working(decode))
            at_prefill = stack.enter_context(ExitStack())
            at_prefill.enter_context(self._fleet.working(prefill))
            call = PrefillCall(self._fleet.channel(prefill), prefill, request, self._patience_s())
            stack.push_async_callback(to_the_end, _free(call, to_decode, request.request_id))
            await self._note_admitted(await call.admitted(), listener)
            end = await self._stream(call, decode, request.request_id, listener, at_prefill)
            self._fleet.held(prefill, keys)
            self._fleet.held(decode, keys)
            if end is None:
                await cancel_decode(to_decode, request.request_id)
            await self._settle(call, end)
        return end.reason if end is not None else common.FINISH_REASON_STOP_STRING

    def _request(
        self, ids: Sequence[int], keys: Sequence[bytes], decode: Worker, features: Sequence[pb.FeatureSource]
    ) -> pb.PrefillRequest:
        job = self._job
        self._tries += 1
        return pb.PrefillRequest(
            request_id=f"{self._stage_id}#{self._tries}",
            token_ids=pack_ids(ids),
            images=job.images,
            sampling=job.sampling,
            root_key=job.root,
            page_keys=b"".join(keys),
            hit_pages=self._hit.pages,
            window=self._hit.window,
            decode_address=decode.address,
            decode_incarnation=decode.incarnation,
            features=features,
            prompt_tokens=len(job.ids) if self.generated else 0,
            tenant=job.tenant,
            encoder_start=self._encoder_start if self.generated else 0,
            decoder_start=self._decoder_start if self.generated else None,
        )

    async def _encode(self) -> list[pb.FeatureSource]:
        """Encode what Prefill will read, all images at once."""
        job = self._job
        start = (
            0 if self._recovery.encode_all else first_computed(self._hit, job.page_tokens, job.window_tokens)
        )
        hashes = list(dict.fromkeys(bytes(image.content_hash) for image in images_needed(job.images, start)))
        if not hashes:
            return []
        began_s = asyncio.get_running_loop().time()
        avoid = self._recovery.avoid
        workers = {key: self._fleet.pick_encoder(key, avoid) for key in hashes}

        async def one(key: bytes) -> bool:
            worker = workers[key]
            timeout_s = min(self._deadlines.encode_s, self._recovery.remaining_s())
            with self._fleet.working(worker):
                done = await encode(
                    self._fleet.channel(worker),
                    worker,
                    job.files[key],
                    key,
                    tenant=job.tenant,
                    timeout_s=timeout_s,
                )
            return not done.cached

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(key)) for key in hashes]
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        elapsed_s = asyncio.get_running_loop().time() - began_s
        self._account.encoded(sum(task.result() for task in tasks), elapsed_s)
        return [pb.FeatureSource(content_hash=key, encoder_address=workers[key].address) for key in hashes]

    async def _note_admitted(self, admitted: pb.PrefillAdmitted, listener: Listener) -> None:
        if self._account.admitted(admitted.sources):
            await listener.started(admitted.sources)
        # What the tokens are computed from, now; a resumed stream must be computed from the same.
        self._hit = resumed_hit(self._hit, admitted.sources.state_restored)
        self._encoder_start, self._decoder_start = admitted.encoder_start, admitted.decoder_start

    async def _stream(
        self, call: PrefillCall, decode: Worker, stage_id: str, listener: Listener, at_prefill: ExitStack
    ) -> pb.StreamEnd | None:
        """Pass tokens on until the end; None when the client has had enough."""
        reopened = False
        resumed_at = len(self.generated)
        while True:
            before = len(self.generated)
            try:
                responses = decode_stream(
                    self._fleet.channel(decode),
                    decode,
                    stage_id,
                    before,
                    self._patience_s(),
                    self._deadlines.token_s,
                )
                async with aclosing(responses):
                    async for response in responses:
                        at_prefill.close()
                        if response.HasField("end"):
                            return _checked_end(response.end, decode)
                        self._account.first_token(asyncio.get_running_loop().time())
                        self.generated.append(response.token.id)
                        if not await listener.token(response.token):
                            return None
            except StageFailure as failure:
                silent = len(self.generated) == resumed_at
                cause = await call.failure(within_s=0.5 if silent else 0.0)
                if cause is not None and silent:
                    raise cause from failure
                # Only the connection may have broken: the worker keeps the tokens, so ask it once more.
                if reopened or failure.failure.code is not StatusCode.UNAVAILABLE:
                    raise
                reopened = len(self.generated) == before
                await asyncio.sleep(0.05)

    async def _settle(self, call: PrefillCall, end: pb.StreamEnd | None) -> None:
        """Add the stages' accounts. A late or broken one costs numbers, never the request."""
        if end is not None:
            self._account.decoded(end)
        try:
            async with asyncio.timeout(PREFILL_DONE_S):
                self._account.prefilled(await call.done())
        except (StageFailure, TimeoutError):
            return

    def _patience_s(self) -> float:
        return min(self._deadlines.prefill_s, self._recovery.remaining_s())


def _checked_end(end: pb.StreamEnd, decode: Worker) -> pb.StreamEnd:
    """FAILED is final; what a worker cancelled by itself (it drains, or lost its stream) is resumed."""
    if end.reason == common.FINISH_REASON_CANCELLED:
        raise broken("decode", decode, end.detail or "cancelled by the worker")
    if end.reason in (common.FINISH_REASON_FAILED, common.FINISH_REASON_UNSPECIFIED):
        raise RequestFailed(StatusCode.INTERNAL, f"decode: {end.detail or 'failed'}")
    return end


async def _free(call: PrefillCall, to_decode: grpc.aio.Channel, request_id: str) -> None:
    """Nothing of this attempt is held anywhere when this returns."""
    await call.cancel()
    await cancel_decode(to_decode, request_id)
