"""Decode's side of a handoff, spoken to directly: nothing incomplete, damaged or foreign ever runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from cedar.actors.errors import Corrupt
from cedar.actors.handoff import STATE_GROUPS, Assembly, pages_frame, state_frames, token_frame
from cedar.actors.wire_prompt import pack_ids
from cedar.kvstore.errors import FrameError
from cedar.kvstore.frames import FrameKind, decode_frame, encode_frame
from cedar.kvstore.header import seal_value
from cedar.model.sampling import SamplingParams as ModelSampling
from cedar.model.sampling import sample
from cedar.model.window_record import export_window
from cedar.v1.common_pb2 import FinishReason, SamplingParams, TokenEvent
from cedar.v1.stages_pb2 import HandoffDone, HandoffFailed, HandoffHeader, HandoffReply, StateMeta
from grpc import StatusCode

GREEDY = ModelSampling(temperature=0)
COUNT = 3


@dataclass(frozen=True)
class Sequence:
    """A prefilled prompt, ready to be handed over."""

    ids: list[int]
    values: list[bytes]
    record: bytes
    first: int


@pytest.fixture(scope="session")
def sequence(network: Any, prompt: Any) -> Callable[[bytes], Sequence]:
    """The prompt of every test here, with its pages named under a root key."""
    from cedar.kvstore.keys import chain_keys

    ids = prompt(40, 70)
    memory, seq = network.own_sequence(list(ids))
    network.prefill(memory, seq, len(ids))
    first = sample(network.finish_prefill(memory, seq), GREEDY, len(ids)).id
    record = export_window(network, memory, seq)

    def under(root: bytes) -> Sequence:
        keys = chain_keys(root, ids, (), 32)
        values = [
            seal_value(
                bytes(memory.pages[i].numpy()), fingerprint=network.fingerprint, page_key=key, tokens=32
            )
            for i, key in enumerate(keys)
        ]
        return Sequence(ids, values, record, first)

    return under


class Peer:
    """A Prefill worker that sends what a test tells it to."""

    def __init__(self, cluster: Any, call: Any, sequence: Sequence) -> None:
        self.cluster = cluster
        self.call = call
        self.sequence = sequence

    async def header(self, request_id: str = "r", **fields: Any) -> HandoffReply:
        cluster, ids = self.cluster, self.sequence.ids
        values: dict[str, Any] = {
            "request_id": request_id,
            "decode_incarnation": cluster.decode.incarnation,
            "fingerprint": cluster.network.fingerprint,
            "state_groups": STATE_GROUPS,
            "token_ids": pack_ids(ids),
            "sampling": SamplingParams(temperature=0, ignore_eos=True, max_tokens=COUNT),
            "root_key": cluster.root,
            "page_keys": b"".join(cluster.keys(ids)),
            "prompt_tokens": len(ids),
        }
        header = HandoffHeader(**(values | fields))
        await self.call.write(encode_frame(FrameKind.HANDOFF_HEADER, header))
        return HandoffReply.FromString((await self.read(FrameKind.HANDOFF_REPLY)).meta)

    async def send(self, *frames: bytes) -> None:
        for frame in frames:
            await self.call.write(frame)

    async def read(self, kind: FrameKind) -> Any:
        return decode_frame(await self.call.read(), expect=kind)

    async def rest(self, index: int = 0) -> HandoffDone:
        await self.send(*state_frames(self.sequence.record, len(self.sequence.ids)))
        await self.send(token_frame(TokenEvent(index=index, id=self.sequence.first)))
        return HandoffDone.FromString((await self.read(FrameKind.HANDOFF_DONE)).meta)

    async def fails(self, code: StatusCode, words: str) -> None:
        """The call ends with this status, and everything is free."""
        with pytest.raises(grpc.aio.AioRpcError, match=words) as failure:
            await self.call.read()
        assert failure.value.code() is code
        self.cluster.decode.assert_idle()


@asynccontextmanager
async def handoff(cluster: Any, sequence: Any) -> AsyncIterator[Peer]:
    call = cluster.stub(cluster.decode.address, "Decode").Handoff(timeout=20)
    try:
        yield Peer(cluster, call, sequence(cluster.root))
    finally:
        call.cancel()


async def test_a_whole_handoff_runs(rig: Any, single: Any, sequence: Any) -> None:
    async with rig() as cluster, handoff(cluster, sequence) as peer:
        reply = await peer.header()
        assert (reply.accepted, list(reply.missing_pages)) == (True, [0, 1])
        await peer.send(pages_frame([]), pages_frame(list(enumerate(peer.sequence.values))))
        done = await peer.rest()
        assert done.pages_received == 2
        tokens, end = await cluster.tokens(0, "r")
        assert [token.id for token in tokens] == single.cold(peer.sequence.ids, COUNT)
        assert end.reason == FinishReason.FINISH_REASON_LENGTH


async def test_pages_that_are_here_are_not_asked_for_again(rig: Any, sequence: Any) -> None:
    async with rig() as cluster:
        for request_id, missing in (("a", [0, 1]), ("b", [])):
            async with handoff(cluster, sequence) as peer:
                reply = await peer.header(request_id)
                assert list(reply.missing_pages) == missing
                await peer.send(pages_frame([(i, peer.sequence.values[i]) for i in missing]))
                await peer.rest()
                await cluster.tokens(0, request_id)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"decode_incarnation": 5}, StatusCode.FAILED_PRECONDITION, "incarnation"),
        ({"fingerprint": b"\x01" * 32}, StatusCode.FAILED_PRECONDITION, "fingerprint"),
        ({"state_groups": STATE_GROUPS[:3]}, StatusCode.FAILED_PRECONDITION, "state_groups"),
        ({"request_id": ""}, StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"page_keys": b"\x01" * 64}, StatusCode.INVALID_ARGUMENT, "page_keys"),
        ({"token_ids": pack_ids([640])}, StatusCode.INVALID_ARGUMENT, "vocabulary"),
        ({"token_ids": b"123"}, StatusCode.INVALID_ARGUMENT, "multiple of 4"),
        ({"prompt_tokens": 71}, StatusCode.INVALID_ARGUMENT, "prompt_tokens"),
        ({"sampling": SamplingParams(max_tokens=0)}, StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"sampling": SamplingParams(max_tokens=5000)}, StatusCode.INVALID_ARGUMENT, "at most 192"),
    ],
)
async def test_a_foreign_or_impossible_header_is_refused(
    rig: Any, sequence: Any, fields: dict[str, Any], code: StatusCode, words: str
) -> None:
    async with rig(decode={"pages": 6}) as cluster, handoff(cluster, sequence) as peer:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as failure:
            await peer.header(**fields)
        assert failure.value.code() is code


async def test_no_room_is_a_reply_with_a_delay(rig: Any, sequence: Any) -> None:
    async with rig(decode={"slots": 1}) as cluster, handoff(cluster, sequence) as first:
        assert (await first.header("a")).accepted
        async with handoff(cluster, sequence) as second:
            reply = await second.header("b")
            assert not reply.accepted
            assert reply.retry_after_ms == 10
        first.call.cancel()


async def test_a_live_id_is_not_taken_twice(rig: Any, sequence: Any) -> None:
    async with rig() as cluster, handoff(cluster, sequence) as first:
        await first.header("a")
        async with handoff(cluster, sequence) as second:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await second.header("a")
            assert failure.value.code() is StatusCode.ALREADY_EXISTS
        first.call.cancel()


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


PAGE_FAULTS: dict[str, Callable[[Sequence], list[bytes]]] = {
    "a flipped bit": lambda s: [pages_frame([(0, damaged(s.values[0], 1000))])],
    "another page's bytes": lambda s: [pages_frame([(0, s.values[1])])],
    "a page twice": lambda s: [pages_frame([(0, s.values[0])])] * 2,
    "a page nobody asked for": lambda s: [pages_frame([(2, s.values[0])])],
    "a short page": lambda s: [pages_frame([(0, s.values[0][:-1])])],
    "another frame": lambda s: [encode_frame(FrameKind.WINDOW, b"")],
}


@pytest.mark.parametrize("fault", PAGE_FAULTS)
async def test_damaged_pages_are_never_used(rig: Any, sequence: Any, fault: str) -> None:
    async with rig() as cluster, handoff(cluster, sequence) as peer:
        await peer.header()
        await peer.send(*PAGE_FAULTS[fault](peer.sequence))
        await peer.fails(StatusCode.DATA_LOSS, ".")
        if fault != "a page twice":
            assert cluster.decode.status().pages_cached == 0


def restated(frames: list[bytes], **fields: Any) -> list[bytes]:
    """The state frames with other metadata."""
    frame = decode_frame(frames[0])
    meta = StateMeta.FromString(frame.meta)
    for name, value in fields.items():
        setattr(meta, name, value)
    return [encode_frame(FrameKind.HANDOFF_STATE, meta, frame.payload)]


STATE_FAULTS: dict[str, Callable[[Sequence], list[bytes]]] = {
    "a flipped bit": lambda s: restated(
        list(state_frames(damaged(s.record, 500), len(s.ids))),
        checksum=StateMeta.FromString(decode_frame(next(state_frames(s.record, 1))).meta).checksum,
    ),
    "another length": lambda s: list(state_frames(s.record, len(s.ids) - 1)),
    "no record": lambda s: [],
    "not a record": lambda s: list(state_frames(b"x" * 500, len(s.ids))),
    "too large": lambda s: restated(list(state_frames(s.record, len(s.ids))), total_bytes=1 << 40),
    "a gap": lambda s: restated(list(state_frames(s.record, len(s.ids))), offset=4),
    "damaged before its checksum was made": lambda s: list(state_frames(damaged(s.record, 500), len(s.ids))),
}


@pytest.mark.parametrize("fault", STATE_FAULTS)
async def test_damaged_state_is_never_used(rig: Any, sequence: Any, fault: str) -> None:
    async with rig() as cluster, handoff(cluster, sequence) as peer:
        await peer.header()
        await peer.send(pages_frame(list(enumerate(peer.sequence.values))))
        await peer.send(*STATE_FAULTS[fault](peer.sequence))
        token = TokenEvent(index=0, id=peer.sequence.first)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may have been refused already
            await peer.send(token_frame(token))
        await peer.fails(StatusCode.DATA_LOSS, ".")


async def test_a_missing_page_or_a_wrong_first_token_is_not_run(rig: Any, sequence: Any) -> None:
    async with rig() as cluster:
        async with handoff(cluster, sequence) as peer:
            await peer.header()
            await peer.send(pages_frame([(1, peer.sequence.values[1])]))
            with pytest.raises(grpc.aio.AioRpcError, match="without pages"):
                await peer.rest()
        async with handoff(cluster, sequence) as peer:
            reply = await peer.header()
            assert list(reply.missing_pages) == [0], "a page that came whole and verified stays"
            await peer.send(pages_frame([(0, peer.sequence.values[0])]))
            with pytest.raises(grpc.aio.AioRpcError, match="expected index 0"):
                await peer.rest(index=4)


@pytest.mark.parametrize("way", ["cancel", "end", "failed", "silence"])
async def test_a_handoff_that_breaks_frees_everything(rig: Any, sequence: Any, way: str) -> None:
    idle_s = 0.5 if way == "silence" else 30.0
    async with rig(decode={"handoff_idle_s": idle_s}) as cluster, handoff(cluster, sequence) as peer:
        await peer.header()
        await peer.send(pages_frame([(0, peer.sequence.values[0])]))
        reader = asyncio.create_task(cluster.tokens(0, "r"))
        while not (found := cluster.decode.table.get("r")) or not found.log.readers:
            await asyncio.sleep(0.005)
        assert cluster.decode.status().slots_leased == 1
        if way == "cancel":
            peer.call.cancel()
        elif way == "end":
            await peer.call.done_writing()
            await peer.fails(StatusCode.UNAVAILABLE, "broke the handoff off")
        elif way == "failed":
            await peer.send(encode_frame(FrameKind.HANDOFF_FAILED, HandoffFailed(reason="no features")))
            await peer.fails(StatusCode.UNAVAILABLE, "no features")
        else:
            await peer.fails(StatusCode.DEADLINE_EXCEEDED, "nothing for 0.5 s")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await reader
        assert failure.value.code() is StatusCode.UNAVAILABLE
        await cluster.idle()
        assert cluster.decode.counters["handoffs_broken"] == 1


async def test_cancelling_a_request_ends_its_handoff(rig: Any, sequence: Any) -> None:
    async with rig() as cluster, handoff(cluster, sequence) as peer:
        await peer.header()
        assert await cluster.cancel(0, "r")
        cluster.decode.assert_idle()
        await peer.fails(StatusCode.CANCELLED, "cancelled by the caller")
        tokens, end = await cluster.tokens(0, "r")
        assert not tokens
        assert end.reason == FinishReason.FINISH_REASON_CANCELLED


def test_an_assembly_is_complete_only_with_everything() -> None:
    record = bytes(range(200))
    value = b"v" * 10
    assembly = Assembly([1, 3], 7, len(value), 1000)
    with pytest.raises(Corrupt, match="without pages"):
        assembly.record()
    assert assembly.pages(decode_frame(pages_frame([(3, value), (1, value)])))[0][0] == 3
    with pytest.raises(Corrupt, match="without the state"):
        assembly.record()
    for frame in state_frames(record, 7):
        assembly.state(decode_frame(frame))
    assert assembly.record() == record
    assert assembly.received == 2
    with pytest.raises(FrameError):
        assembly.state(decode_frame(next(state_frames(record, 7))))
