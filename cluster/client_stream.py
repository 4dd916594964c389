"""What a client of one request sees: Started once, a Delta for each token, and Finished once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from cedar.cluster.usage import Account
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as generation

# Messages ahead of a slow client; then its Decode stream waits.
AHEAD = 256


class Text(Protocol):
    """A growing reply (``cedar.actors.prompts`` makes them)."""

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, if one did."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""

    def flush(self) -> str:
        """What was held back, at the end."""


class ClientStream:
    """The ``Listener`` of a request: turns its events into messages, in order, at most ``AHEAD`` ahead of
    its reader."""

    def __init__(self, request_id: str, text: Text) -> None:
        self._request_id = request_id
        self._text = text
        self._queue: asyncio.Queue[generation.GenerateResponse | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD)
        self.tokens = 0

    async def until_done(self, task: asyncio.Task[Any]) -> AsyncIterator[generation.GenerateResponse]:
        """Messages until ``task`` has ended, however it ended, and all of them are out."""
        task.add_done_callback(lambda _: self._queue.put_nowait(None))
        while (message := await self._queue.get()) is not None:
            self._room.release()
            yield message

    async def started(self, sources: common.PromptSources) -> None:
        """See ``Listener``."""
        started = generation.Started(request_id=self._request_id, sources=sources)
        await self._put(generation.GenerateResponse(started=started))

    async def token(self, token: common.TokenEvent) -> bool:
        """See ``Listener``."""
        self.tokens += 1
        delta = generation.Delta(token=token, text=self._text.push(token.id))
        await self._put(generation.GenerateResponse(delta=delta))
        return self._text.stop is None

    def finished(
        self, reason: common.FinishReason, account: Account, retries: int
    ) -> list[generation.GenerateResponse]:
        """The last messages: text that was held back, if any, and the end with the account."""
        last = []
        rest = self._text.flush()
        if rest:
            last.append(generation.GenerateResponse(delta=generation.Delta(text=rest)))
        stop = self._text.stop
        finished = generation.Finished(
            # The model's own end may come with the token that completes a stop string.
            reason=common.FINISH_REASON_STOP_STRING if stop is not None else reason,
            completion_tokens=self.tokens,
            sources=account.sources,
            traffic=account.traffic,
            times=account.times,
            retries=retries,
            stop=stop or "",
        )
        return [*last, generation.GenerateResponse(finished=finished)]

    async def _put(self, message: generation.GenerateResponse) -> None:
        await self._room.acquire()
        self._queue.put_nowait(message)
