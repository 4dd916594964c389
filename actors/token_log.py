"""The tokens of one request: appended once, readable from any index by any number of readers, ended once.

A reader that breaks off comes back with the index it wants next. The log knows since when nobody reads it,
which is the lease of a request that its client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from cedar.actors.errors import BooksError, OutOfRange, StageError
from cedar.v1.common_pb2 import TokenEvent
from cedar.v1.stages_pb2 import StreamEnd


class TokenLog:
    """Append-only log of one request's generated tokens.

    ``first_index`` is the index of the first token generated here: above 0 when earlier ones were generated
    by a worker that died. ``clock`` gives monotonic seconds.
    """

    def __init__(self, first_index: int, clock: Callable[[], float]) -> None:
        self.first_index = first_index
        self._clock = clock
        self._tokens: list[TokenEvent] = []
        self._end: StreamEnd | StageError | None = None
        self._readers = 0
        self._unread_since = clock()
        self._changed = asyncio.Event()

    @property
    def next_index(self) -> int:
        """Index of the token that comes next."""
        return self.first_index + len(self._tokens)

    @property
    def ended(self) -> bool:
        """Whether no token will follow."""
        return self._end is not None

    @property
    def readers(self) -> int:
        """Streams that read the log now."""
        return self._readers

    def unread_s(self) -> float:
        """Seconds since the last reader left (or since the log began); 0 while somebody reads."""
        return 0.0 if self._readers else self._clock() - self._unread_since

    def touch(self) -> None:
        """Start the lease anew."""
        self._unread_since = self._clock()

    def append(self, token: TokenEvent) -> None:
        """Add the next token. BooksError when its index is not the next one or the log has ended."""
        if self._end is not None:
            raise BooksError(f"token {token.index} after the end of its log")
        if token.index != self.next_index:
            raise BooksError(f"token {token.index} in a log that expects {self.next_index}")
        self._tokens.append(token)
        self._wake()

    def finish(self, end: StreamEnd | StageError) -> bool:
        """End the log. The first end stands; False for every later one.

        A StageError says that the request cannot go on here but may elsewhere: readers get it as an error.
        """
        if self._end is not None:
            return False
        self._end = end
        self._unread_since = self._clock()
        self._wake()
        return True

    async def read(self, from_index: int) -> AsyncGenerator[TokenEvent | StreamEnd]:
        """Tokens from ``from_index`` on as they come, then exactly one StreamEnd (or its error).

        OutOfRange when ``from_index`` lies below the first token generated here.
        """
        if from_index < self.first_index:
            raise OutOfRange(
                f"from_index={from_index}: this worker's first token is {self.first_index}; "
                "the ones before were generated elsewhere"
            )
        position = from_index - self.first_index
        self._readers += 1
        try:
            while True:
                changed = self._changed
                while position < len(self._tokens):
                    position += 1
                    yield self._tokens[position - 1]
                if isinstance(self._end, StageError):
                    raise self._end
                if self._end is not None:
                    yield self._end
                    return
                if changed is self._changed:
                    await changed.wait()
        finally:
            self._readers -= 1
            self._unread_since = self._clock()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
