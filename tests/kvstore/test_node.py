from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import MIB, NodeConfig, SsdConfig
from cedar.kvstore.errors import InvalidRequest, NotInMemory, StoreLocked
from cedar.kvstore.frames import FrameKind, decode_frame, encode_frame, record_checksum
from cedar.kvstore.header import open_value, seal_value
from cedar.kvstore.node import SERVICE, PortInUse, StoreNode, main, parse_arguments
from cedar.kvstore.rpc import ServiceStub, channel_options
from cedar.kvstore.segment import VALUES_FILE
from cedar.kvstore.values_file import ValuesFile
from cedar.v1 import store_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

K = b"k" * 32


@asynccontextmanager
async def stub_of(node: StoreNode) -> AsyncIterator[ServiceStub]:
    async with grpc.aio.insecure_channel(node.address, options=channel_options()) as channel:
        yield ServiceStub(channel, SERVICE)


def page_frame(keys: list[bytes], values: list[bytes], **fields: Any) -> bytes:
    meta = {"page_keys": b"".join(keys), "value_bytes": len(values[0])} | fields
    return encode_frame(FrameKind.PAGES, store_pb2.StoredMeta(**meta), *values)


def window_frame(record: bytes, **fields: Any) -> bytes:
    meta = {
        "page_key": K,
        "tokens": 5,
        "digest": K,
        "total_bytes": len(record),
        "checksum": record_checksum(record),
    } | fields
    return encode_frame(FrameKind.WINDOW, store_pb2.WindowMeta(**meta), record)


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    try:
        if hasattr(call, "__aiter__"):
            _ = [message async for message in call]
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


# ---- the way it should go ----


async def test_pages_round_trip_in_order(running_node: Any, chains: Any):
    keys = chains.keys(700)
    async with running_node() as node, stub_of(node) as stub:
        frames = [
            page_frame(keys[i : i + 70], [chains.value(key) for key in keys[i : i + 70]], first_page=i)
            for i in range(0, 700, 70)
        ]
        answer = await stub.PutPages(iter(frames), timeout=20)
        assert (answer.stored, answer.present, answer.conflicts, answer.refused) == (700, 0, 0, 0)
        request = store_pb2.MatchRequest(
            root_key=chains.root(), page_keys=b"".join(keys + chains.keys(1, salt=1))
        )
        assert (await stub.MatchPrefix(request, timeout=5)).pages == 700
        messages = [
            decode_frame(message)
            async for message in stub.GetPages(
                store_pb2.GetPagesRequest(page_keys=b"".join(keys)), timeout=20
            )
        ]
        metas = [store_pb2.StoredMeta.FromString(frame.meta) for frame in messages]
        assert len(metas[0].page_keys) == 32  # the first page does not wait for others
        assert b"".join(meta.page_keys for meta in metas) == b"".join(keys)
        assert max(len(frame.payload) for frame in messages) <= 1 << 20
        payload = b"".join(bytes(frame.payload) for frame in messages)
        assert payload == b"".join(chains.value(key) for key in keys)
        entry = node.ssd._index.get(keys[345])
        assert entry is not None
        assert entry.page_index == 345


async def test_the_stream_ends_at_the_first_page_that_is_not_held(running_node: Any, chains: Any):
    keys = chains.keys(10)
    async with running_node() as node, stub_of(node) as stub:
        values = [chains.value(key) for key in keys]
        await stub.PutPages(
            iter([page_frame(keys[:4], values[:4]), page_frame(keys[5:], values[5:])]), timeout=5
        )
        request = store_pb2.GetPagesRequest(page_keys=b"".join(keys))
        frames = [decode_frame(message) async for message in stub.GetPages(request, timeout=5)]
        assert sum(len(frame.payload) for frame in frames) == 4 * len(values[0])
        nothing = store_pb2.GetPagesRequest(page_keys=b"".join(chains.keys(3, salt=5)))
        assert [message async for message in stub.GetPages(nothing, timeout=5)] == []


async def test_what_is_in_memory_is_read_on_the_loop_and_the_rest_by_reader_threads(
    running_node: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    keys = chains.keys(60)
    values = [chains.value(key, 100_000) for key in keys]
    cold_positions = range(20, 45)
    reads: list[tuple[int, bool, bool]] = []
    announced: list[int] = []
    async with running_node() as node, stub_of(node) as stub:
        frames = [page_frame([key], [value]) for key, value in zip(keys, values, strict=True)]
        assert (await stub.PutPages(iter(frames), timeout=20)).stored == 60
        read_into, announce = node.ssd.read_into, node.ssd.announce

        def read(wanted: list[bytes], most: int, place: Any, *, wait: bool = True) -> Any:
            reads.append((keys.index(wanted[0]), wait, threading.current_thread() is threading.main_thread()))
            if not wait and keys.index(wanted[0]) in cold_positions:
                raise NotInMemory
            return read_into(wanted, most, place, wait=wait)

        def tell(wanted: list[bytes]) -> None:
            announced.extend(map(keys.index, wanted))
            announce(wanted)

        monkeypatch.setattr(node.ssd, "read_into", read)
        monkeypatch.setattr(node.ssd, "announce", tell)
        request = store_pb2.GetPagesRequest(page_keys=b"".join(keys))
        messages = [decode_frame(message) async for message in stub.GetPages(request, timeout=20)]
    assert b"".join(bytes(frame.payload) for frame in messages) == b"".join(values)
    assert [wait == on_loop for _, wait, on_loop in reads] == [False] * len(reads)
    waited = [position for position, wait, _ in reads if wait]
    assert [position in cold_positions for position in waited] == [True] * 3
    assert announced == sorted(set(announced))  # each once
    assert set(range(waited[1], 60)) <= set(announced) <= set(range(waited[0], 60))


async def test_a_stream_ends_before_a_damaged_page_which_is_put_aside(running_node: Any, chains: Any):
    keys = chains.keys(30)
    values = [chains.value(key) for key in keys]
    async with running_node() as node, stub_of(node) as stub:
        await stub.PutPages(iter([page_frame(keys, values)]), timeout=20)
        entry = node.ssd._index.get(keys[17])
        assert entry is not None
        with (entry.segment.path / VALUES_FILE).open("r+b") as file:
            file.seek(entry.offset + 300)
            byte = file.read(1)
            file.seek(entry.offset + 300)
            file.write(bytes([byte[0] ^ 4]))
        request = store_pb2.GetPagesRequest(page_keys=b"".join(keys))
        for _ in range(2):
            messages = [decode_frame(message) async for message in stub.GetPages(request, timeout=20)]
            assert b"".join(bytes(frame.payload) for frame in messages) == b"".join(values[:17])
        assert node.counters["store_values_corrupt"] == 1
        assert node.counters["store_pages_read"] == 34
        assert (await stub.PutPages(iter([page_frame(keys, values)]), timeout=20)).stored == 1
        messages = [decode_frame(message) async for message in stub.GetPages(request, timeout=20)]
        assert b"".join(bytes(frame.payload) for frame in messages) == b"".join(values)


async def test_conflicts_are_counted_and_the_first_stays(running_node: Any, chains: Any):
    (key,) = chains.keys(1)
    async with running_node() as node, stub_of(node) as stub:
        first, second = chains.value(key), chains.other_value(key)
        answer = await stub.PutPages(
            iter([page_frame([key], [value]) for value in (first, second, first)]), timeout=5
        )
        assert (answer.stored, answer.present, answer.conflicts) == (1, 1, 1)
        assert node.ssd.get(key) == first


async def test_windows_round_trip_and_are_listed_longest_first(running_node: Any, chains: Any):
    keys = chains.keys(3)
    record = random.Random(1).randbytes(2_900_000)
    async with running_node() as node:
        client = StoreClient(node.address)
        await client.put_pages(keys[:2], [chains.value(key) for key in keys[:2]])
        assert await client.put_window(keys[1], 70, K, record)
        assert await client.put_window(keys[0], 40, K, b"short")
        assert await client.put_window(chains.root(), 3, K, b"root")
        assert await client.put_window(keys[2], 99, K, b"beyond the pages that are held")
        assert await client.get_window(keys[1], 70, K) == record
        assert await client.get_window(keys[1], 71, K) is None
        match = await client.match(chains.root(), keys)
        assert match.pages == 2
        assert [window.tokens for window in match.windows] == [70, 40, 3]
        assert not await client.put_window(K, 1, K, bytes(9 * MIB))  # more than the budget
        await client.close()


async def test_stats_have_fixed_names(running_node: Any, chains: Any):
    async with running_node() as node:
        client = StoreClient(node.address)
        await client.put_pages(chains.keys(2), [chains.value(key) for key in chains.keys(2)])
        stats = await client.stats()
        assert stats["store_pages"] == stats["store_puts_stored"] == 2
        assert stats["store_page_bytes"] == 2 * len(chains.value(K))
        assert stats["store_window_budget_bytes"] == 8 * MIB
        await client.close()


async def test_health_and_graceful_stop(running_node: Any, chains: Any):
    keys = chains.keys(400)
    async with running_node() as node:
        async with grpc.aio.insecure_channel(node.address, options=channel_options()) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for service in ("", "cedar.v1.Store"):
                status = await check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                assert status.status == health_pb2.HealthCheckResponse.SERVING
        client = StoreClient(node.address)
        putting = asyncio.create_task(client.put_pages(keys, [chains.value(key) for key in keys]))
        while node.counters["store_puts_stored"] == 0:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(node.stop(5))
        assert (await putting).stored == 400  # a call in flight ends
        await stopping
        assert (await client.match(chains.root(), keys)).pages == 0
        await client.close()
        assert await node.start()  # the directory is free again, with everything in it
        assert node.ssd.match(keys) == 400


async def test_an_address_in_use_is_one_clear_line(running_node: Any, tmp_path: Path):
    async with running_node() as node:
        port = int(node.address.rsplit(":", 1)[1])
        other = StoreNode(NodeConfig(ssd=SsdConfig(directory=tmp_path / "other"), port=port))
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            await other.start()
        locked = StoreNode(NodeConfig(ssd=node.config.ssd))
        with pytest.raises(StoreLocked, match="in use by process"):
            await locked.start()


async def test_the_loop_is_not_held_up_by_the_disk(
    running_node: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    loop_thread = threading.get_ident()
    touched = set()

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if named.get("wait", True):
                touched.add(threading.get_ident())
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    for name in ("read", "read_into", "write", "sync"):
        watch(ValuesFile, name)
    keys = chains.keys(20)
    async with running_node() as node:
        client = StoreClient(node.address)
        values = [chains.value(key) for key in keys]
        for _ in range(2):
            await client.put_pages(keys, values)
            assert len([i async for i, _ in client.get_pages(keys)]) == 20
        await client.match(chains.root(), keys)
        await client.stats()
        await client.close()
        assert touched
        assert loop_thread not in touched


# ---- bad input ----


def bad_puts(chains: Any) -> Iterator[tuple[str, list[bytes], str]]:
    (key,) = chains.keys(1)
    value = chains.value(key)
    foreign = seal_value(b"x" * 3392, fingerprint=b"?" * 32, page_key=K, tokens=32)
    yield "not a frame", [b"hello"], "at least 16 bytes"
    yield "empty message", [b""], "at least 16 bytes"
    yield "another kind", [encode_frame(FrameKind.WINDOW, b"")], "expected PAGES"
    yield "garbage meta", [encode_frame(FrameKind.PAGES, b"\xff\xff\xff", value)], ""
    yield "no keys", [page_frame([], [value])], "at least one key"
    yield "a short key", [page_frame([key[:31]], [value])], "multiple of 32"
    yield "too many keys", [page_frame([key] * 3000, [value])], "at most 2000 keys"
    yield "no bytes", [page_frame([key], [value], value_bytes=0)], "value_bytes"
    yield "a huge size", [page_frame([key], [value], value_bytes=2**32 - 1)], "at most"
    yield "too little payload", [page_frame([key, K], [value])], "payload"
    yield "too much payload", [page_frame([key], [value, value])], "payload"
    yield "a flipped bit", [page_frame([key], [value[:-1] + bytes([value[-1] ^ 1])])], "checksum"
    yield "another page's value", [page_frame([K], [value])], "another page"
    yield "a cut value", [page_frame([key], [value[:-1]])], "length"
    yield "an unknown model", [page_frame([K], [foreign])], "not a model of this store"
    yield "a long tenant", [page_frame([key], [value], tenant=b"t" * 65)], "tenant"
    yield "a huge place", [page_frame([key], [value], first_page=2**32 - 1)], "first_page"
    unknown = (
        store_pb2.StoredMeta(page_keys=key, value_bytes=len(value)).SerializeToString() + b"\xf8\x07\x01"
    )
    yield "unknown fields", [encode_frame(FrameKind.PAGES, unknown, value)], "unknown fields"


def bad_windows() -> Iterator[tuple[str, list[bytes], str]]:
    yield "no frames", [], "at least one"
    yield "not a frame", [b"hello"], "at least 16 bytes"
    yield "another kind", [encode_frame(FrameKind.PAGES, b"")], "expected WINDOW"
    yield "a short key", [window_frame(b"r", page_key=b"k")], "page_key"
    yield "a short digest", [window_frame(b"r", digest=b"k")], "digest"
    yield "no tokens", [window_frame(b"r", tokens=0)], "tokens"
    yield "a short checksum", [window_frame(b"r", checksum=b"c")], "checksum"
    yield "a wrong checksum", [window_frame(b"r", checksum=b"c" * 16)], "differs"
    yield "no bytes", [window_frame(b"")], "total_bytes"
    yield "a false size", [window_frame(b"r", total_bytes=2**60)], "total_bytes"
    yield "ends early", [window_frame(b"r", total_bytes=5)], "ended before"
    yield "starts late", [window_frame(b"r", offset=1)], "offset"
    yield "goes on", [window_frame(b"r"), window_frame(b"r", offset=1)], "missing"
    yield (
        "two records",
        [window_frame(b"r", total_bytes=2), window_frame(b"s", total_bytes=2, tokens=6)],
        "one record",
    )


async def test_every_bad_input_is_refused_with_a_reason_and_changes_nothing(running_node: Any, chains: Any):
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    fingerprints = (chains.fingerprint,)
    async with running_node(fingerprints=fingerprints, max_keys=2000) as node, stub_of(node) as stub:
        for name, frames, said in bad_puts(chains):
            code, details = await outcome(stub.PutPages(iter(frames), timeout=5))
            assert code == invalid, (name, code, details)
            assert said in details, (name, details)
        for name, frames, said in bad_windows():
            code, details = await outcome(stub.PutWindow(iter(frames), timeout=5))
            assert code == invalid, (name, code, details)
            assert said in details, (name, details)
        keys = b"".join(chains.keys(2))
        requests = [
            (stub.MatchPrefix, store_pb2.MatchRequest(root_key=b"r", page_keys=keys), "root_key"),
            (stub.MatchPrefix, store_pb2.MatchRequest(root_key=K, page_keys=keys[:-1]), "multiple of 32"),
            (stub.MatchPrefix, store_pb2.MatchRequest(root_key=K, page_keys=K * 2001), "at most 2000"),
            (stub.MatchPrefix, store_pb2.MatchRequest.FromString(b"\xf8\x07\x01"), "unknown fields [127]"),
            (stub.GetPages, store_pb2.GetPagesRequest(), "at least one key"),
            (stub.GetPages, store_pb2.GetPagesRequest(page_keys=b"x"), "multiple of 32"),
            (stub.GetPages, store_pb2.GetPagesRequest(page_keys=K * 2001), "at most 2000"),
            (stub.GetWindow, store_pb2.GetWindowRequest(page_key=K, tokens=1, digest=b"d"), "digest"),
            (stub.GetWindow, store_pb2.GetWindowRequest(page_key=K, digest=K), "tokens"),
            (stub.Stats, store_pb2.StatsRequest.FromString(b"\xf8\x07\x01"), "unknown fields"),
        ]
        for method, request, said in requests:
            code, details = await outcome(method(request, timeout=5))
            assert code == invalid, (said, code, details)
            assert said in details
        stats = node.ssd.stats() | node.windows.stats()
        assert (
            stats["store_pages"] == stats["store_window_records"] == stats["store_window_promised_bytes"] == 0
        )
        assert node.counters["store_requests_invalid"] > 40
        answer = await stub.MatchPrefix(store_pb2.MatchRequest(root_key=K), timeout=5)  # no full page yet
        assert answer.pages == 0


async def test_random_frames_are_refused_without_harm(running_node: Any, chains: Any):
    rng = random.Random(4)
    (key,) = chains.keys(1)
    good = page_frame([key], [chains.value(key)])
    async with running_node() as node, stub_of(node) as stub:
        for method in (stub.PutPages, stub.PutWindow):
            for _ in range(150):
                damaged = bytearray(good)
                for _ in range(rng.randrange(1, 4)):
                    damaged[rng.randrange(90)] ^= 1 << rng.randrange(8)
                message = bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.3 else damaged)
                code, _ = await outcome(method(iter([message]), timeout=5))
                assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK)
        assert node.ssd.get(key) in (None, chains.value(key))


async def test_a_message_over_the_limit_is_refused(running_node: Any, chains: Any):
    async with running_node(max_message_bytes=100_000) as node, stub_of(node) as stub:
        (key,) = chains.keys(1)
        frame = page_frame([key], [chains.value(key, 200_000)])
        code, _ = await outcome(stub.PutPages(iter([frame]), timeout=5))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_too_many_calls_are_refused_with_a_delay(running_node: Any, chains: Any):
    async with running_node(max_writes=2, retry_after_s=0.25) as node, stub_of(node) as stub:
        gate = asyncio.Event()
        keys = chains.keys(3)

        async def held(key: bytes) -> AsyncIterator[bytes]:
            yield page_frame([key], [chains.value(key)])
            await gate.wait()

        calls = [asyncio.ensure_future(stub.PutPages(held(key), timeout=10)) for key in keys[:2]]
        while node.counters["store_puts_stored"] < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PutPages(iter([page_frame(keys[2:], [chains.value(keys[2])])]), timeout=5)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata() or ())["retry-after-ms"] == "250"
        client = StoreClient(node.address)
        counts = await client.put_pages(keys[2:], [chains.value(keys[2])])
        assert (counts.refused, counts.reason, counts.retry_after_s) == (1, "busy", 0.25)
        gate.set()
        assert [(await call).stored for call in calls] == [1, 1]
        assert (await client.put_pages(keys[2:], [chains.value(keys[2])])).stored == 1
        await client.close()


async def test_a_caller_that_leaves_frees_what_it_held(running_node: Any, chains: Any):
    async with running_node() as node, stub_of(node) as stub:
        record = bytes(MIB)

        async def half() -> AsyncIterator[bytes]:
            yield window_frame(record[:100], total_bytes=len(record))
            await asyncio.sleep(60)

        call = stub.PutWindow(half(), timeout=30)
        while node.windows.promised_bytes == 0:
            await asyncio.sleep(0.001)
        call.cancel()
        while node.windows.promised_bytes:
            await asyncio.sleep(0.001)
        keys = chains.keys(600)
        await stub.PutPages(iter([page_frame(keys, [chains.value(key) for key in keys])]), timeout=10)
        for _ in range(5):
            reading = stub.GetPages(store_pb2.GetPagesRequest(page_keys=b"".join(keys)), timeout=30)
            await reading.read()
            reading.cancel()
        stats = dict((await stub.Stats(store_pb2.StatsRequest(), timeout=5)).values)
        while stats["store_reads_in_flight"] or stats["store_window_calls_in_flight"]:
            stats = dict((await stub.Stats(store_pb2.StatsRequest(), timeout=5)).values)


async def test_a_queue_that_stays_full_refuses_after_a_while(
    running_node: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    async with running_node(ssd={"queue_bytes": 5000}, put_wait_s=0.05) as node:
        go = threading.Event()
        write = node.ssd._writer._committer.write
        monkeypatch.setattr(node.ssd._writer._committer, "write", lambda *a: (go.wait(10), write(*a))[1])
        client = StoreClient(node.address)
        keys = chains.keys(2)
        first = asyncio.create_task(client.put_pages(keys[:1], [chains.value(keys[0])]))
        while node.ssd._writer.queued_bytes == 0:
            await asyncio.sleep(0.001)
        counts = await client.put_pages(keys[1:], [chains.value(keys[1])])
        assert counts.refused == 1
        assert node.counters["store_puts_refused_queue"] == 1
        go.set()
        assert (await first).stored == 1
        await client.close()


async def test_a_put_whose_caller_leaves_is_still_answered_inside(
    running_node: Any, chains: Any, monkeypatch: pytest.MonkeyPatch
):
    async with running_node() as node, stub_of(node) as stub:
        entered, go = threading.Event(), threading.Event()
        write = node.ssd._writer._committer.write

        def slow(*arguments: Any) -> str:
            entered.set()
            go.wait(10)
            return write(*arguments)

        monkeypatch.setattr(node.ssd._writer._committer, "write", slow)
        keys = chains.keys(3)
        frames = [page_frame([key], [chains.value(key)]) for key in keys]
        call = stub.PutPages(iter(frames[:2]), timeout=30)
        while not entered.is_set():
            await asyncio.sleep(0.001)
        call.cancel()
        while (await stub.Stats(store_pb2.StatsRequest(), timeout=5)).values["store_writes_in_flight"]:
            await asyncio.sleep(0.001)
        go.set()
        answer = await stub.PutPages(iter(frames), timeout=10)
        assert answer.present >= 1
        assert answer.present + answer.stored == 3
        assert node.ssd.match(keys) == 3


# ---- the command ----


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, peers = parse_arguments(
        ["--directory", str(tmp_path), "--capacity-gib", "1", "--ttl-hours", "1", "--window-mib", "3",
         "--fingerprint", "ab" * 32, "--durability", "none", "--copies", "3", "--node-id", "n1"]
    )  # fmt: skip
    assert (peers.copies, peers.node_id, config.tls) == (3, "n1", None)
    assert config.ssd.capacity_bytes == 1 << 30
    assert config.ssd.ttl_s == 3600
    assert config.window.budget_bytes == 3 * MIB
    assert config.fingerprints == (b"\xab" * 32,)
    assert main(["--directory", str(tmp_path), "--capacity-gib", "-1"]) == 2
    assert "capacity_bytes" in capsys.readouterr().err
    assert main(["--directory", str(tmp_path), "--fingerprint", "zz"]) == 2
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    assert "--directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"port": 70_000}, "port"),
        ({"read_threads": 0}, "read_threads"),
        ({"fingerprints": (b"x",)}, "fingerprints"),
    ],
)
def test_impossible_node_configurations_name_the_field(change: dict, field: str, tmp_path: Path):
    with pytest.raises(InvalidRequest, match=field):
        NodeConfig(ssd=SsdConfig(directory=tmp_path), **change)


def test_a_value_opens_where_it_arrives(chains: Any):
    (key,) = chains.keys(1)
    assert open_value(chains.value(key), page_key=key, fingerprint=chains.fingerprint) == chains.payload(key)
