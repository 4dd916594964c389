"""What one request remembers of its failures: whom not to ask again, and when to give up.

The verdicts are ``cedar.cluster.retry``'s; this applies them.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from cedar.cluster.directory import Worker
from cedar.cluster.errors import NoWorker
from cedar.cluster.fleet import Fleet
from cedar.cluster.retry import plan
from cedar.cluster.stage_calls import StageFailure
from grpc import StatusCode

PAUSE_S = 0.25


class RequestFailed(Exception):
    """The request cannot be served. ``status`` and ``detail`` go to the client."""

    def __init__(self, status: StatusCode, detail: str, retry_after_ms: int = 0) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.retry_after_ms = retry_after_ms


class Recovery:
    """Belongs to one request. ``waiting``: requests that no worker of a stage takes, shared with the
    gateway's load report.

    ``deadline_s`` on the loop's clock; ``worker_s``: how long to wait for a worker to appear.
    """

    def __init__(
        self, fleet: Fleet, waiting: Counter[str], *, deadline_s: float, worker_s: float, max_attempts: int
    ) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._deadline_s = deadline_s
        self._worker_s = worker_s
        self._max_attempts = max_attempts
        self._asked: dict[str, Worker] = {}
        self._excluded: dict[tuple[str, int], str] = {}
        self._busy: set[tuple[str, int]] = set()
        self._delay_ms = 0
        self._missing_since_s: float | None = None
        self.failures = 0
        self.encode_all = False

    @property
    def avoid(self) -> set[tuple[str, int]]:
        """Workers not to pick now."""
        return {*self._excluded, *self._busy}

    def asked(self, *workers: Worker) -> None:
        """These are being asked now; a failure is blamed on one of them."""
        self._missing_since_s = None
        self._asked.update({worker.stage: worker for worker in workers})

    def remaining_s(self) -> float:
        """Time to the request's deadline; raises ``RequestFailed`` when it has passed."""
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise RequestFailed(StatusCode.DEADLINE_EXCEEDED, "the request's deadline has passed")
        return left_s

    def failed(self, error: StageFailure, *, streamed: bool) -> None:
        """Take a failure in, so that the next attempt may begin. Raises ``RequestFailed`` when there is
        none to make."""
        failure = error.failure
        decision = plan(
            failure,
            attempts=self.failures + 1,
            max_attempts=self._max_attempts,
            streamed=streamed,
            remaining_s=self._deadline_s - asyncio.get_running_loop().time(),
        )
        if decision.action == "fail":
            raise RequestFailed(decision.status, _client_detail(error), decision.delay_ms) from error
        worker = error.worker if failure.cause == failure.called else self._asked.get(failure.cause)
        if decision.action == "wait":
            self._delay_ms = max(self._delay_ms, decision.delay_ms)
            if worker is not None:
                self._busy.add((worker.address, worker.incarnation))
            return
        self.failures += 1
        self.encode_all = self.encode_all or decision.action == "encode"
        if worker is not None and decision.exclude is not None:
            self._excluded[(worker.address, worker.incarnation)] = worker.stage
            if decision.suspect:
                self._fleet.suspect(worker)

    async def no_worker(self, error: NoWorker) -> None:
        """Wait until someone can be asked again: the busy ones after their delay, others when they appear."""
        left_s = self.remaining_s()
        self._waiting[error.stage] += 1
        try:
            if self._busy:
                await asyncio.sleep(min(self._delay_ms / 1000, left_s))
                self._busy.clear()
                self._delay_ms = 0
                return
            now_s = asyncio.get_running_loop().time()
            self._missing_since_s = self._missing_since_s or now_s
            if now_s - self._missing_since_s > self._worker_s:
                raise RequestFailed(StatusCode.UNAVAILABLE, f"{error} for {self._worker_s:g} s") from error
            # One that failed may be the only one there is; a dead one stays suspected in the fleet's view.
            self._excluded = {key: stage for key, stage in self._excluded.items() if stage != error.stage}
            await self._fleet.changed(min(PAUSE_S, left_s))
        finally:
            self._waiting[error.stage] -= 1


def _client_detail(error: StageFailure) -> str:
    """What a client may read: the caller's fault in full, otherwise the stage and its words, without
    addresses."""
    failure = error.failure
    if failure.code is StatusCode.INVALID_ARGUMENT:
        return failure.detail
    return f"{failure.cause}: {failure.code.name.lower()}: {failure.detail}"
