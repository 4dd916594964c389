"""The contents of one handoff, from Prefill to Decode, as frames. Pure: bytes in, bytes out.

    Prefill -> HandoffHeader                      Decode -> HandoffReply (accepted, the pages it lacks)
            -> pages it lacks, as they are sealed (an empty one is a heartbeat)
            -> state record, in parts
            -> first token, or failure            Decode -> HandoffDone

Every page travels as its stored value (header with key, model, checksum); the state record has a checksum of
its own. ``Assembly`` counts what has come against what must come, so that an incomplete sequence never runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from cedar.actors.errors import Corrupt
from cedar.kvstore.frames import (
    FRAME_BYTES,
    Frame,
    FrameKind,
    RecordAssembler,
    encode_frame,
    record_checksum,
    split_record,
)
from cedar.v1.common_pb2 import TokenEvent
from cedar.v1.stages_pb2 import FirstToken, PageMeta, StateMeta

STATE_GROUPS: Final = ("global_kv", "index_keys", "window", "tails")
"""Everything that makes up a sequence's state. Both sides must name the same list, or they refuse."""


def pages_frame(pages: Sequence[tuple[int, bytes]]) -> bytes:
    """Stored values of pages, by page index in the sequence; no page at all is a heartbeat."""
    return encode_frame(
        FrameKind.HANDOFF_PAGES, PageMeta(index=[i for i, _ in pages]), *(v for _, v in pages)
    )


def state_frames(record: bytes, tokens: int) -> Iterator[bytes]:
    """The state record of a sequence of ``tokens`` tokens, in parts of about a mebibyte."""
    checksum = record_checksum(record)
    for offset, part in split_record(record, FRAME_BYTES):
        meta = StateMeta(
            tokens=tokens,
            total_bytes=len(record),
            offset=offset,
            checksum=checksum if offset == 0 else b"",
        )
        yield encode_frame(FrameKind.HANDOFF_STATE, meta, part)


def token_frame(token: TokenEvent) -> bytes:
    """The first token, which ends the handoff."""
    return encode_frame(FrameKind.HANDOFF_TOKEN, FirstToken(token=token))


class Assembly:
    """What one handoff must still bring, on the Decode side.

    ``missing``: page indices that were asked for. ``tokens``: length of the sequence, which the state must be
    of. ``value_bytes``: size of a stored page. ``state_limit_bytes``: largest state record taken.
    Every method raises Corrupt (or FrameError) for what was not asked for, came twice, or does not fit.
    """

    def __init__(
        self, missing: Collection[int], tokens: int, value_bytes: int, state_limit_bytes: int
    ) -> None:
        self.missing = set(missing)
        self.received = 0
        self._tokens = tokens
        self._value_bytes = value_bytes
        self._state_limit = state_limit_bytes
        self._state: RecordAssembler | None = None

    def pages(self, frame: Frame) -> list[tuple[int, memoryview]]:
        """(page index, stored value) of each page in the frame. The values are still to be verified."""
        indices = list(PageMeta.FromString(frame.meta).index)
        if len(frame.payload) != len(indices) * self._value_bytes:
            raise Corrupt(
                f"handoff: {len(frame.payload)} bytes for {len(indices)} pages of {self._value_bytes} bytes"
            )
        for index in indices:
            if index not in self.missing:
                raise Corrupt(f"handoff: page {index} came twice or was not asked for")
            self.missing.remove(index)
        self.received += len(indices)
        size = self._value_bytes
        return [(index, frame.payload[i * size : (i + 1) * size]) for i, index in enumerate(indices)]

    def state(self, frame: Frame) -> None:
        """A part of the state record."""
        meta = StateMeta.FromString(frame.meta)
        if meta.tokens != self._tokens:
            raise Corrupt(f"handoff: state of {meta.tokens} tokens for a sequence of {self._tokens}")
        if self._state is None:
            self._state = RecordAssembler(meta.total_bytes, meta.checksum, limit_bytes=self._state_limit)
        self._state.add(meta.offset, frame.payload)

    def record(self) -> bytes:
        """The whole, verified state record. Corrupt when pages or parts of the state have not come."""
        if self.missing:
            raise Corrupt(f"handoff: ended without pages {sorted(self.missing)[:8]}")
        if self._state is None:
            raise Corrupt("handoff: ended without the state record")
        return self._state.finish()
