"""The Generation service: from a client's call to one request life, and every way out of it.

Exactly one thing ends a call: a ``Finished`` message, or a gRPC status. The request runs in a task of
its own, so that it frees everything also when the call is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

from cedar.actors.prompts import Prompt, PromptTools
from cedar.cluster.active import ActiveRequests
from cedar.cluster.admission import Admission
from cedar.cluster.client_stream import ClientStream
from cedar.cluster.config import ClusterConfig
from cedar.cluster.errors import CallerError, Overloaded, Unauthenticated
from cedar.cluster.fleet import Fleet
from cedar.cluster.limits import admitted_sampling, check_images, limits_of
from cedar.cluster.recovery import Recovery, RequestFailed
from cedar.cluster.request_life import Job, RequestLife
from cedar.cluster.store_lookup import Query, StoreLookup
from cedar.cluster.tenants import Tenant, Tenants
from cedar.cluster.usage import Account
from cedar.kvstore.keys import root_key
from cedar.kvstore.metrics import PromptMetrics
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb
from grpc import StatusCode

logger = logging.getLogger(__name__)


class GenerationService:
    """Servicer of ``cedar.v1.Generation``. Belongs to one event loop."""

    def __init__(
        self, config: ClusterConfig, tools: PromptTools, tenants: Tenants, fleet: Fleet, store: StoreLookup
    ) -> None:
        self._config = config
        self._tools = tools
        self._tenants = tenants
        self._fleet = fleet
        self._store = store
        self._limits = limits_of(config, tools.context_tokens, tools.page_tokens)
        self._threads = ThreadPoolExecutor(config.gateway.threads, thread_name_prefix="prompt")
        self._roots: dict[bytes, bytes] = {}
        self.admission = Admission(config.gateway.max_active_requests, config.gateway.max_queued_requests)
        self.active = ActiveRequests()
        self.waiting: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.prompts = PromptMetrics(tools.page_tokens)
        self.draining = False

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """See generation.proto."""
        self.counters["requests"] += 1
        try:
            if self.draining:
                raise RequestFailed(StatusCode.UNAVAILABLE, "the gateway is going away")
            tenant = self._tenants.of(context.invocation_metadata() or ())
            with self.active.entered(tenant.name, request.request_id) as key:
                # Closed here, not when it is collected: the id is free once nothing of the request is left.
                async with aclosing(self._serve(request, tenant, key, context)) as responses:
                    async for response in responses:
                        yield response
        except Unauthenticated as error:
            await self._refuse(context, StatusCode.UNAUTHENTICATED, str(error))
        except CallerError as error:
            await self._refuse(context, StatusCode.INVALID_ARGUMENT, str(error))
        except Overloaded as error:
            await self._refuse(context, StatusCode.RESOURCE_EXHAUSTED, error.reason, error.retry_after_ms)
        except RequestFailed as error:
            await self._refuse(context, error.status, error.detail, error.retry_after_ms)
        except Exception:
            logger.exception("request %r failed", request.request_id)
            await self._refuse(context, StatusCode.INTERNAL, "a bug in the gateway; its log says more")

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        """See generation.proto."""
        try:
            tenant = self._tenants.of(context.invocation_metadata() or ())
        except Unauthenticated as error:
            await self._refuse(context, StatusCode.UNAUTHENTICATED, str(error))
        return pb.CancelResponse(found=await self.active.cancel(tenant.name, request.request_id))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """See generation.proto."""
        tools = self._tools
        return pb.GetModelResponse(
            name=self._config.model.served_name,
            fingerprint=tools.fingerprint,
            context_tokens=tools.context_tokens,
            vocabulary=tools.vocabulary,
            page_tokens=tools.page_tokens,
            page_bytes=tools.page_bytes,
            bytes_per_token=tools.bytes_per_token,
            vision=tools.vision,
        )

    async def ended(self, within_s: float) -> bool:
        """Wait until every request has freed what it held; whether that came in time."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        while self.active and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.01)
        return not self.active

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.prompts.close()

    async def _serve(
        self, request: pb.GenerateRequest, tenant: Tenant, key: tuple[str, str], context: Any
    ) -> AsyncGenerator[pb.GenerateResponse]:
        loop = asyncio.get_running_loop()
        account = Account(loop.time())
        deadline_s = loop.time() + self._allowed_s(context)
        prompt = await self._prepared(request, deadline_s)
        sampling = admitted_sampling(len(prompt.ids), request.sampling, self._limits)
        stream = ClientStream(key[1], self._tools.text(list(sampling.stop)))
        recovery = Recovery(
            self._fleet,
            self.waiting,
            deadline_s=deadline_s,
            worker_s=self._config.deadlines.worker_s,
            max_attempts=self._config.gateway.max_attempts,
        )
        job = self._job(key[1], prompt, tenant, sampling, deadline_s)
        life = RequestLife(job, self._fleet, self._look_up(job), self._config.deadlines, recovery, account)
        task = asyncio.create_task(self._run(life, stream, account, deadline_s), name=f"request {key[1]}")
        self.active.running(key, task)
        try:
            async for response in stream.until_done(task):
                yield response
            for response in stream.finished(_reason(task), account, recovery.failures):
                yield response
        finally:
            task.cancel()
            await asyncio.wait({task})
            if account.sources is not None:
                self.prompts.admitted(tenant.name, account.sources)

    async def _run(
        self, life: RequestLife, stream: ClientStream, account: Account, deadline_s: float
    ) -> common.FinishReason:
        loop = asyncio.get_running_loop()
        waiting_since_s = loop.time()
        async with _until(deadline_s), self.admission.room():
            account.waited(loop.time() - waiting_since_s)
            return await life.run(stream)

    async def _prepared(self, request: pb.GenerateRequest, deadline_s: float) -> Prompt:
        """The prompt, once a thread had time for it."""
        loop = asyncio.get_running_loop()
        with self.admission.arriving():
            async with _until(deadline_s):
                return await loop.run_in_executor(self._threads, self._prepare, request)

    def _prepare(self, request: pb.GenerateRequest) -> Prompt:
        """On a thread of its own: tokenizing and decoding images take milliseconds to seconds."""
        check_images(request, self._limits)
        try:
            return self._tools.prepare(request)
        except ValueError as error:
            raise RequestFailed(StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _job(
        self,
        request_id: str,
        prompt: Prompt,
        tenant: Tenant,
        sampling: common.SamplingParams,
        deadline_s: float,
    ) -> Job:
        tools = self._tools
        if tenant.domain not in self._roots:
            self._roots[tenant.domain] = root_key(tools.format_id, tools.fingerprint, tenant.domain)
        return Job(
            request_id=request_id,
            ids=prompt.ids,
            images=prompt.images,
            files=prompt.files,
            root=self._roots[tenant.domain],
            tenant=tenant.domain,
            sampling=sampling,
            fingerprint=tools.fingerprint,
            page_tokens=tools.page_tokens,
            window_tokens=tools.window_tokens,
            end_token=tools.end_token,
            deadline_s=deadline_s,
        )

    def _look_up(self, job: Job) -> Any:
        async def look_up(keys: Any) -> Any:
            query = Query(job.tenant, job.root, keys, job.ids, job.images, job.page_tokens)
            return await self._store.hit(query)

        return look_up

    def _allowed_s(self, context: Any) -> float:
        asked_s = context.time_remaining()
        limit_s = self._config.deadlines.request_s
        return limit_s if asked_s is None else min(limit_s, asked_s)

    async def _refuse(
        self, context: Any, status: StatusCode, detail: str, retry_after_ms: int = 0
    ) -> NoReturn:
        self.counters[status.name.lower()] += 1
        metadata = (("retry-after-ms", str(retry_after_ms)),) if retry_after_ms else ()
        await context.abort(status, detail, metadata)
        raise AssertionError("abort raises")


@asynccontextmanager
async def _until(deadline_s: float) -> AsyncIterator[None]:
    """Ends the block at the request's deadline, with the status for it."""
    limit = asyncio.timeout_at(deadline_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestFailed(StatusCode.DEADLINE_EXCEEDED, "the request's deadline has passed") from None


def _reason(task: asyncio.Task[common.FinishReason]) -> common.FinishReason:
    """Why it ended; a task that was cancelled while its call lives was cancelled by the client's Cancel."""
    return common.FINISH_REASON_CANCELLED if task.cancelled() else task.result()
