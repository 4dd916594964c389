"""Requests being served, by tenant and id, so that they can be cancelled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cedar.cluster.errors import CallerError

MAX_ID_CHARACTERS = 128


@dataclass
class _Entry:
    task: asyncio.Task[Any] | None = None
    cancelled: bool = False


class ActiveRequests:
    """A tenant's ids are its own: nobody else can name, cancel or collide with them."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

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
        if key in self._entries:
            raise CallerError("request_id", request_id, "an id that is not in use")
        self._entries[key] = _Entry()
        try:
            yield key
        finally:
            del self._entries[key]

    def running(self, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        """This task serves the request from now on; one that was cancelled before does not start."""
        entry = self._entries[key]
        entry.task = task
        if entry.cancelled:
            task.cancel()

    async def cancel(self, tenant: str, request_id: str) -> bool:
        """Stop a request and wait until it has freed everything. False when there is none.

        One whose prompt is still being prepared holds nothing yet; it ends as soon as that is done.
        """
        entry = self._entries.get((tenant, request_id))
        if entry is None:
            return False
        entry.cancelled = True
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait({entry.task})
        return True
