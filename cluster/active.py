"""Requests being served, by tenant and id, so that they can be cancelled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from cedar.cluster.errors import CallerError

MAX_ID_CHARACTERS = 128


class ActiveRequests:
    """A tenant's ids are its own: nobody else can name, cancel or collide with them."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[object] | None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self, tenant: str, asked_id: str) -> Iterator[tuple[str, str]]:
        """The key of a new request, for as long as it lives. An empty ``asked_id`` gets one.

        Raises ``CallerError`` for an id that is in use or no plain name.
        """
        request_id = asked_id or secrets.token_hex(8)
        if len(request_id) > MAX_ID_CHARACTERS or not request_id.isprintable() or "#" in request_id:
            raise CallerError(
                "request_id", repr(request_id[:200]), f"printable, without '#', at most {MAX_ID_CHARACTERS}"
            )
        key = (tenant, request_id)
        if key in self._tasks:
            raise CallerError("request_id", request_id, "an id that is not in use")
        self._tasks[key] = None
        try:
            yield key
        finally:
            del self._tasks[key]

    def running(self, key: tuple[str, str], task: asyncio.Task[object]) -> None:
        """This task serves the request."""
        self._tasks[key] = task

    async def cancel(self, tenant: str, request_id: str) -> bool:
        """Stop a request and wait until it has freed everything. False when there is none."""
        key = (tenant, request_id)
        if key not in self._tasks:
            return False
        task = self._tasks[key]
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        return True
