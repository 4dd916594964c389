"""The requests of a Decode worker: live ones, and ended ones for a while, so that a broken stream resumes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cedar.actors.errors import Duplicate, StageError
from cedar.actors.pool import PageRef, SlotRef
from cedar.actors.store_writer import Receipt
from cedar.actors.token_log import TokenLog

if TYPE_CHECKING:
    from cedar.model.state import ImageSpan


@dataclass(eq=False)
class DecodeRequest:
    """One request's place here.

    ``keys``: page keys of its full pages so far. ``missing``: prompt pages that must still come. Until
    ``handing_over`` ends it belongs to the handoff's stream, after that to whoever reads its tokens.
    ``in_engine``: the engine may touch its memory. ``freed``: pages and slot are given back.
    """

    request_id: str
    log: TokenLog
    root: bytes
    keys: list[bytes]
    images: tuple[ImageSpan, ...]
    pages: list[PageRef]
    slot: SlotRef
    receipt: Receipt
    begun: float
    missing: list[int]
    after_replay: bool = False
    pages_sealed: int = 0
    handing_over: bool = True
    in_engine: bool = False
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Future[StageError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def stop_handoff(self, error: StageError) -> None:
        """Make the handoff end with ``error``."""
        if not self.stopped.done():
            self.stopped.set_result(error)


class RequestTable:
    """Requests by id. Ended ones stay for ``ttl_s`` after the last read, at most ``limit`` of them."""

    def __init__(self, limit: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._limit = limit
        self._ttl_s = ttl_s
        self._live: dict[str, DecodeRequest] = {}
        self._ended: OrderedDict[str, DecodeRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def check_new(self, request_id: str) -> None:
        """Duplicate when a request of this id is alive."""
        if request_id in self._live:
            raise Duplicate(f"request {request_id!r} is alive on this worker: cancel it first")

    def add(self, request: DecodeRequest) -> None:
        """Enter a live request; an ended one of the same id is forgotten."""
        self.check_new(request.request_id)
        self._ended.pop(request.request_id, None)
        self._live[request.request_id] = request

    def get(self, request_id: str) -> DecodeRequest | None:
        """The request of this id, live or ended."""
        return self._live.get(request_id) or self._ended.get(request_id)

    def live(self) -> list[DecodeRequest]:
        """Requests whose logs have not ended."""
        return list(self._live.values())

    def finished(self, request: DecodeRequest) -> None:
        """A live request's log has ended."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
            self._ended[request.request_id] = request
            self.expire()

    def expire(self) -> None:
        """Forget ended requests that are too old or too many."""
        for request in list(self._ended.values()):
            if request.log.unread_s() > self._ttl_s:
                del self._ended[request.request_id]
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)
