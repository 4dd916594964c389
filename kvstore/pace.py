"""A bandwidth limit to wait for: the token bucket of ``eviction``, on the event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from cedar.kvstore.eviction import TokenBucket

_POLL_S: Final = 0.01
_BURST_S: Final = 0.25


class Pace:
    """At most ``bytes_per_s`` on average, with bursts of a quarter of a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s * _BURST_S, time.monotonic())

    async def take(self, amount: int) -> None:
        """Wait until ``amount`` bytes may go."""
        while not self._bucket.take(amount, time.monotonic()):
            await asyncio.sleep(_POLL_S)
