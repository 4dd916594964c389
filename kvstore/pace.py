"""A bandwidth limit to wait for: the token bucket of ``eviction``, on the event loop."""

from __future__ import annotations

import asyncio
from typing import Final

from cedar.kvstore.eviction import TokenBucket

_POLL_S: Final = 0.01
_BURST_S: Final = 0.25


class Pace:
    """At most ``bytes_per_s`` on average, with bursts of a quarter of a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s * _BURST_S, 0.0)

    async def take(self, amount: int) -> None:
        """Wait until ``amount`` bytes may go."""
        now_s = asyncio.get_running_loop().time
        while not self._bucket.take(amount, now_s()):
            await asyncio.sleep(_POLL_S)
