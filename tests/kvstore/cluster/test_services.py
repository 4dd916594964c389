"""The services between nodes: bad requests are refused with a clear status, and nothing comes to harm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.epochs import EPOCH, NODE, enclosed_list
from cedar.kvstore.frames import FrameKind, encode_frame
from cedar.kvstore.member_feed import SERVICE
from cedar.kvstore.members import from_proto
from cedar.kvstore.membership_service import MembershipService
from cedar.kvstore.node import SERVICE as STORE
from cedar.kvstore.rpc import ServiceStub
from cedar.kvstore.tenant_purge import PEER_SERVICE
from cedar.kvstore.tls import ChannelMaker
from cedar.v1 import membership_pb2, store_pb2
from cedar.v1 import store_peer_pb2 as pb

Code = grpc.StatusCode


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def drained(call: Any) -> list[Any]:
    return [message async for message in call]


async def test_peer_requests_that_make_no_sense(fleet: Any, chains: Any) -> None:
    node = await fleet.add("a")
    keys = chains.keys(4)
    good = encode_frame(
        FrameKind.PAGES,
        store_pb2.StoredMeta(page_keys=keys[0], value_bytes=len(chains.value(keys[0])), tenant=b"t"),
        chains.value(keys[0]),
    )
    swapped = encode_frame(
        FrameKind.PAGES,
        store_pb2.StoredMeta(page_keys=keys[1], value_bytes=len(chains.value(keys[0]))),
        chains.value(keys[0]),
    )
    empty = encode_frame(FrameKind.PAGES, store_pb2.StoredMeta(), b"")
    async with ChannelMaker(None).open(node.address) as channel:
        stub = ServiceStub(channel, PEER_SERVICE)

        async def copy(*frames: bytes) -> Any:
            async def messages() -> AsyncIterator[bytes]:
                for frame in frames:
                    yield frame

            return await stub.CopyPages(messages(), timeout=5)

        for call in (
            stub.HeldPages(pb.HeldRequest(page_keys=b"short"), timeout=5),
            stub.HeldPages(pb.HeldRequest(page_keys=b""), timeout=5),
            stub.HeldPages(pb.HeldRequest(root_key=b"r", page_keys=keys[0]), timeout=5),
            drained(stub.FetchPages(store_pb2.GetPagesRequest(page_keys=b"x" * 33), timeout=5)),
            drained(stub.ListPages(pb.ListPagesRequest(node_id="a", epoch=77), timeout=5)),
            copy(b"nonsense"),
            copy(swapped),
            copy(empty),
            copy(good[:-1]),
        ):
            assert (await refused(call)).code() == Code.INVALID_ARGUMENT
        assert (await copy(good)).stored == 1
        found = await refused(
            drained(
                stub.FetchWindow(
                    store_pb2.GetWindowRequest(page_key=keys[0], tokens=3, digest=keys[1]), timeout=5
                )
            )
        )
        assert found.code() == Code.NOT_FOUND
        held = await stub.HeldPages(pb.HeldRequest(page_keys=b"".join(keys)), timeout=5)
        assert held.held == b"\1\0\0\0"
        listed = await drained(stub.ListPages(pb.ListPagesRequest(node_id="a", epoch=1), timeout=5))
        assert [message.page_keys for message in listed] == [keys[0]]


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        (((EPOCH, "1"), (NODE, "a")), None),
        (((EPOCH, "9"), (NODE, "a")), None),
        ((), None),
        (((EPOCH, "0"), (NODE, "a")), Code.FAILED_PRECONDITION),
        (((EPOCH, "1"), (NODE, "b")), Code.FAILED_PRECONDITION),
        (((EPOCH, "many"), (NODE, "a")), Code.INVALID_ARGUMENT),
    ],
)
async def test_epochs_and_names_are_checked_on_every_call(
    fleet: Any, chains: Any, metadata: Any, code: Any
) -> None:
    node = await fleet.add("a")
    keys = chains.keys(1)

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async with ChannelMaker(None).open(node.address) as channel:
        store, peer = ServiceStub(channel, STORE), ServiceStub(channel, PEER_SERVICE)
        window = store_pb2.GetWindowRequest(page_key=keys[0], tokens=1, digest=keys[0])
        told = {"timeout": 5, "metadata": metadata}
        calls = [
            store.MatchPrefix(store_pb2.MatchRequest(root_key=keys[0]), **told),
            drained(store.GetPages(store_pb2.GetPagesRequest(page_keys=keys[0]), **told)),
            store.PutPages(nothing(), **told),
            store.PutWindow(nothing(), **told),
            drained(store.GetWindow(window, **told)),
            peer.HeldPages(pb.HeldRequest(page_keys=keys[0]), **told),
            drained(peer.FetchPages(store_pb2.GetPagesRequest(page_keys=keys[0]), **told)),
            drained(peer.ListPages(pb.ListPagesRequest(node_id="a", epoch=1), **told)),
            drained(peer.FetchWindow(window, **told)),
            peer.CopyPages(nothing(), **told),
        ]
        for call in calls:
            got = told_list = None
            try:
                await call
            except grpc.aio.AioRpcError as error:
                got, told_list = error.code(), enclosed_list(error.trailing_metadata())
            assert told_list == (fleet.list if got == Code.FAILED_PRECONDITION else None)
            if code is None:
                assert got in (None, Code.NOT_FOUND, Code.INVALID_ARGUMENT)
            else:
                assert got == code


async def test_the_membership_service(tmp_path: Path) -> None:
    clock = ManualClock()
    state = tmp_path / "members.json"
    service = MembershipService(state_file=state, clock=clock)
    address = await service.start()
    try:
        async with ChannelMaker(None).open(address) as channel:
            stub = ServiceStub(channel, SERVICE)
            watch = stub.Watch(membership_pb2.WatchRequest(epoch=0))
            join = membership_pb2.JoinRequest(node_id="a", address="h:1", incarnation=1)
            response = await stub.Join(join, timeout=5)
            assert (response.refused, response.lease_s) == ("", 10.0)
            assert from_proto(await watch.read()).find("a") is not None
            other = membership_pb2.JoinRequest(node_id="a", address="h:2", incarnation=2)
            assert "second node" in (await stub.Join(other, timeout=5)).refused
            for bad in ({"node_id": ""}, {"node_id": "x" * 200}, {"node_id": "n", "weight": -1.0}):
                call = stub.Join(membership_pb2.JoinRequest(address="h:9", **bad), timeout=5)
                assert (await refused(call)).code() == Code.INVALID_ARGUMENT
            renew = membership_pb2.RenewRequest(node_id="nobody", incarnation=1)
            assert not (await stub.Renew(renew, timeout=5)).known
            watch.cancel()
    finally:
        await service.stop()
    again = MembershipService(state_file=state, clock=clock)
    assert [m.node_id for m in again.membership.list.members] == ["a"]
    assert again.membership.list.epoch == service.membership.list.epoch
