"""Cleaning up that a second cancellation cannot interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to its end, whoever cancels us meanwhile; then be cancelled. ``work`` must be bounded.

    A request is cancelled by its deadline and by its client in the same moment: the second must not break
    off what the first began to free.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
