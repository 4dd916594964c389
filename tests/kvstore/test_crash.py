"""kill -9 of a real node in the middle of its commits; what it acknowledged must be intact afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import ClientConfig

ROUNDS = 24
PATIENT = ClientConfig(match_timeout_s=5, stall_timeout_s=5, put_timeout_s=10)


async def start(directory: Path) -> tuple[asyncio.subprocess.Process, StoreClient]:
    command = (
        sys.executable, "-m", "cedar.kvstore.node", "--directory", str(directory), "--capacity-gib", "0.5",
        "--segment-mib", "2", "--reserve-mib", "1", "--window-mib", "4",
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return process, StoreClient(json.loads(line)["address"], config=PATIENT)


async def put_until_killed(client: StoreClient, chains: Any, salt: int, acked: list[list[bytes]]) -> None:
    while True:
        keys = chains.keys(12, salt=salt)
        salt += 1
        counts = await client.put_pages(keys, [chains.value(key) for key in keys])
        if counts.stored == len(keys):
            acked.append(keys)
        elif counts.reason in ("unavailable", "timeout"):
            return


async def expect_intact(client: StoreClient, chains: Any, acked: list[list[bytes]]) -> None:
    for keys in acked:
        received = [bytes(value) async for _, value in client.get_pages(keys)]
        assert received == [chains.value(key) for key in keys]


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, chains: Any):
    rng = random.Random(23)
    acked: list[list[bytes]] = []
    for number in range(ROUNDS):
        process, client = await start(tmp_path / "store")
        try:
            recent = acked[-12:] + rng.sample(acked, min(8, len(acked)))
            await expect_intact(client, chains, recent)
            puts = [
                asyncio.create_task(put_until_killed(client, chains, number * 2000 + writer * 1000, acked))
                for writer in range(2)
            ]
            await asyncio.sleep(rng.uniform(0.01, 0.12))
            process.send_signal(signal.SIGKILL)
            await asyncio.gather(*puts)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await client.close()
    process, client = await start(tmp_path / "store")
    try:
        assert len(acked) > ROUNDS
        await expect_intact(client, chains, acked)
        stats = await client.stats()
        assert stats["store_values_corrupt"] == 0
        assert stats["store_segments_damaged"] == 0
    finally:
        process.terminate()
        await process.wait()
        await client.close()
    assert process.returncode == 0


async def test_kill_9_while_starting(tmp_path: Path, chains: Any):
    directory = tmp_path / "store"
    process, client = await start(directory)
    keys = chains.keys(200)
    assert (await client.put_pages(keys, [chains.value(key) for key in keys])).stored == 200
    await client.close()
    process.kill()
    await process.wait()
    for delay_s in (0.1, 0.2, 0.25, 0.3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cedar.kvstore.node", "--directory", str(directory),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asyncio.sleep(delay_s)
        process.kill()
        await process.wait()
    process, client = await start(directory)
    try:
        for _ in range(50):
            if (await client.match(chains.root(), keys)).pages == 200:
                break
            await asyncio.sleep(0.05)  # set aside and being salvaged: also fine
        await expect_intact(client, chains, [keys])
    finally:
        process.terminate()
        await process.wait()
        await client.close()


async def test_a_second_node_on_one_directory_says_so(tmp_path: Path):
    process, client = await start(tmp_path / "store")
    try:
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cedar.kvstore.node", "--directory", str(tmp_path / "store"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode == 2
        assert out == b""
        assert f"in use by process {process.pid}" in err.decode()
        assert (await client.stats())["store_pages"] == 0
    finally:
        process.terminate()
        await process.wait()
        await client.close()
    assert not os.path.exists(f"/proc/{process.pid}")
