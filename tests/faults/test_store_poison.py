"""A poisoned client: thousands of frames, requests and headers that lie, to every method of a node.

Each is refused with a status that says so, or is harmless; no exception escapes (that would be UNKNOWN), the
memory of the node stays bounded, and its data is what it was.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
from cedar.kvstore.admin import ADMIN_SERVICE
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.epochs import EPOCH, NODE
from cedar.kvstore.frames import FrameKind, encode_frame
from cedar.kvstore.node import StoreNode
from cedar.kvstore.rpc import channel_options
from cedar.kvstore.tenant_purge import PEER_SERVICE
from cedar.v1 import store_pb2
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from .store_child import FINGERPRINT, PAGE_TOKENS, keys_of, value_of

CALLS = 3_000
AT_ONCE = 16
CHECK_S = 1  # a Check may be told to take its time
PAGES = 6
HARMLESS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}
NUMBERS = (0, 1, 2, 31, 32, 255, 2**16, 2**31 - 1, 2**32 - 1)
INTEGERS = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)
HEADERS = (EPOCH, NODE)


def noise(rng: random.Random) -> bytes:
    keys = keys_of(rng.randrange(3), PAGES)
    return rng.choice(
        (
            b"",
            b"x",
            keys[0],
            b"".join(keys),
            keys[0][:-1],
            b"".join(keys) * 40,
            rng.randbytes(rng.randrange(200)),
        )
    )


def lie(kind: Any, rng: random.Random, depth: int = 0) -> Any:
    """A message of this type whose fields say anything."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if rng.random() < 0.25:
            continue
        repeated = field.is_repeated
        values: list[Any] = []
        # Not 300 records: each may be an order to purge, which the node carries out, one after the other.
        many = 300 if field.message_type is None else 4
        for _ in range(rng.choice((1, 2, many)) if repeated else 1):
            if field.message_type is not None:
                if field.message_type.GetOptions().map_entry or depth > 2:
                    continue
                values.append(lie(field.message_type, rng, depth + 1))
            elif field.type == FieldDescriptor.TYPE_BYTES:
                values.append(noise(rng))
            elif field.type == FieldDescriptor.TYPE_STRING:
                values.append(rng.choice(("", "a", "\0", "../../etc", "x" * 5000)))
            elif field.type == FieldDescriptor.TYPE_BOOL:
                values.append(rng.random() < 0.5)
            elif field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
                values.append(rng.choice((0.0, -1.0, 1e308, float("nan"), float("inf"))))
            elif field.type == FieldDescriptor.TYPE_ENUM:
                values.append(rng.choice((0, 1, 77)))
            else:
                number = rng.choice(NUMBERS)
                is_wide = field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64)
                narrow = number if field.type in INTEGERS else min(number, 2**31 - 1)
                values.append(rng.choice((number, 2**63 - 1)) if is_wide else narrow)
        if repeated and field.message_type is not None:
            for value in values:
                getattr(message, field.name).add().CopyFrom(value)
        elif repeated:
            getattr(message, field.name).extend(values)
        elif values and field.message_type is not None:
            getattr(message, field.name).CopyFrom(values[0])
        elif values:
            setattr(message, field.name, values[0])
    return message


def damaged(message: bytes, rng: random.Random) -> bytes:
    changed = bytearray(message)
    for _ in range(rng.randrange(0, 4)):
        if changed:
            changed[rng.randrange(min(len(changed), 120))] ^= 1 << rng.randrange(8)
    cut = rng.random()
    if cut < 0.2:
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    return bytes(changed) + (rng.randbytes(rng.randrange(9)) if cut > 0.9 else b"")


def frames(rng: random.Random) -> bytes:
    """A frame, some of it as it should be."""
    key = keys_of(9, 1)[0]
    value = value_of(key, 3392)
    choice = rng.random()
    if choice < 0.5:
        meta: Any = store_pb2.StoredMeta(page_keys=key, value_bytes=len(value), tenant=b"tenant")
    else:
        kinds = [m for m in store_pb2.DESCRIPTOR.message_types_by_name.values() if m.name.endswith("Meta")]
        meta = lie(rng.choice(kinds), rng)
    payload = value if rng.random() < 0.7 else rng.randbytes(rng.randrange(300))
    kind = (
        rng.choice(list(FrameKind)) if rng.random() < 0.3 else rng.choice((FrameKind.PAGES, FrameKind.WINDOW))
    )
    return damaged(encode_frame(kind, meta, payload), rng)


def calls(services: list[ServiceDescriptor], rng: random.Random) -> Iterator[tuple[str, list[bytes]]]:
    """Full method names and the messages to send, evenly over all methods."""
    methods = [method for service in services for method in service.methods]
    for number in range(CALLS):
        method = methods[number % len(methods)]
        name = f"/{method.containing_service.full_name}/{method.name}"
        if method.input_type.full_name == "cedar.v1.RawFrame":
            yield name, [frames(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
        else:
            message = lie(method.input_type, rng).SerializeToString()
            yield name, [message if rng.random() < 0.6 else damaged(message, rng)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def outcome(
    channel: grpc.aio.Channel, name: str, messages: list[bytes], header: str
) -> tuple[Any, str]:
    async def send() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    metadata = tuple((name, header) for name in HEADERS) if header else None
    method: Any = channel.stream_stream(name)
    call = method(send(), timeout=CHECK_S if name.endswith("/Check") else 30, metadata=metadata)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


async def test_thousands_of_lies(tmp_path: Path) -> None:
    rng = random.Random(99)
    node = StoreNode(
        NodeConfig(
            ssd=SsdConfig(directory=tmp_path / "store", capacity_bytes=256 * MIB, reserve_bytes=MIB),
            window=WindowConfig(budget_bytes=8 * MIB),
            max_keys=2000,
        )
    )
    address = await node.start()
    client = StoreClient(address, config=ClientConfig(stall_timeout_s=20))
    keys = keys_of(0, PAGES)
    values = [value_of(key) for key in keys]
    found: Counter[str] = Counter()
    wrong: list[Any] = []
    try:
        assert (await client.put_pages(keys, values, tenant=b"kept")).stored == PAGES
        services = [store_pb2.DESCRIPTOR.services_by_name["Store"], PEER_SERVICE, ADMIN_SERVICE]
        before = resident_bytes()
        queue = calls(services, rng)

        async def worker(channel: grpc.aio.Channel) -> None:
            for name, messages in queue:
                header = rng.choice(("", "", "0", "-1", "x" * 50, "9" * 400))
                code, details = await outcome(channel, name, messages, header)
                found[code.name] += 1
                # The asyncio client loses the status of a call that ends while it is still being written.
                lost = code == grpc.StatusCode.INTERNAL and details == "Internal error from Core"
                slow = (
                    name.endswith("/Check") and code == grpc.StatusCode.DEADLINE_EXCEEDED
                )  # as it was asked
                if code not in HARMLESS and not (lost and len(messages) > 1) and not slow:
                    wrong.append((name, code.name, details, [m[:80] for m in messages]))

        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            await asyncio.gather(*(worker(channel) for _ in range(AT_ONCE)))
        assert not wrong, wrong[:5]
        assert found["INVALID_ARGUMENT"] > CALLS // 3, found
        assert resident_bytes() - before < 64 * MIB
        await client.put_pages(keys, values, tenant=b"kept")  # should one of the lies have been a purge
        assert [bytes(value) async for _, value in client.get_pages(keys)] == values
        node.ssd.check_integrity(deep=True)
        node.windows.check_integrity()
        stats = node.ssd.stats()
        assert stats["store_queue_bytes"] == 0
        assert (await client.stats())["store_writes_in_flight"] == 0
    finally:
        await client.close()
        await node.stop(0.2)


async def test_a_flood_of_announced_bytes_takes_no_memory(tmp_path: Path) -> None:
    """A thousand window records that claim to be large and never come, and frames that end half-way."""
    node = StoreNode(
        NodeConfig(
            ssd=SsdConfig(directory=tmp_path / "store", capacity_bytes=256 * MIB, reserve_bytes=MIB),
            window=WindowConfig(budget_bytes=8 * MIB),
        )
    )
    address = await node.start()
    try:
        before = resident_bytes()
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            key = keys_of(0, 1)[0]

            async def promise(number: int) -> Any:
                meta = store_pb2.WindowMeta(
                    page_key=key, tokens=PAGE_TOKENS + number, digest=FINGERPRINT, total_bytes=7 * MIB,
                    checksum=bytes(16),
                )  # fmt: skip
                return await outcome(
                    channel, "/cedar.v1.Store/PutWindow", [encode_frame(FrameKind.WINDOW, meta, b"some")], ""
                )

            answers = await asyncio.gather(*(promise(number) for number in range(1000)))
        assert {code for code, _ in answers} <= HARMLESS
        assert resident_bytes() - before < 48 * MIB
        stats = node.windows.stats()
        assert stats["store_window_records"] == stats["store_window_bytes"] == 0
        assert stats["store_window_promised_bytes"] == 0
        node.windows.check_integrity()
    finally:
        await node.stop(0.2)
