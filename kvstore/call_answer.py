"""Waiting for a call's answer when its channel may be closed meanwhile.

gRPC then cancels the call, and whoever awaits it sees ``CancelledError`` as if its own task had been
cancelled. It was not: that the connection is gone is a failure like any other, and must not end a task that
goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class ChannelClosed(TimeoutError):
    """The call's channel was closed."""


async def answer_of(call: Awaitable[T]) -> T:
    """The call's answer. ChannelClosed."""
    try:
        return await call
    except asyncio.CancelledError:
        if own_cancellation():
            raise
        raise ChannelClosed("the channel was closed") from None


def own_cancellation() -> bool:
    """Whether this task itself is being cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
