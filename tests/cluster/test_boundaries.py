"""What crosses each boundary, counted; and what stays behind: nothing."""

import asyncio
import os
import socket
import struct
from pathlib import Path

import pytest
from cedar.actors.prompts import PromptTools
from cedar.cluster.client import GenerationClient
from cedar.cluster.processes import descendants
from cedar.kvstore.header import HEADER_BYTES
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as pb

from .in_process import collect, finished_of
from .pictures import picture
from .ray_cluster import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HIDDEN = 128


def ask(text: str, image: bytes, max_tokens: int) -> pb.GenerateRequest:
    sampling = common.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=text, images=[image], sampling=sampling)


async def test_every_boundary_is_counted(ray_cluster: RayCluster, tools: PromptTools) -> None:
    before = ray_cluster.workers("store")[0].store
    text = "Count what crosses, page by page, byte by byte, and leave nothing out." * 2
    request = ask(text, picture(11), 40)
    prompt = tools.prepare(request)
    async with GenerationClient(ray_cluster.address) as client:
        end = finished_of(await collect(client, request))
        after = ray_cluster.workers("store")[0].store
        again = finished_of(await collect(client, request))
    assert before is not None
    assert after is not None
    pages = len(prompt.ids) // tools.page_tokens
    run = (len(prompt.ids) + 40 - 1) // tools.page_tokens
    assert end.traffic.pages_hit == 0
    assert end.traffic.pages_sealed == run
    assert end.traffic.pages_sent == pages
    assert end.traffic.page_bytes_sent == pages * (tools.page_bytes + HEADER_BYTES)
    assert end.traffic.pages_stored == run
    assert after["store_pages"] - before["store_pages"] == run
    assert end.traffic.feature_bytes_sent == prompt.images[0].length * HIDDEN * 2
    assert end.traffic.images_encoded == 1
    assert end.traffic.state_bytes_sent > 0
    # The same again: pages are where they were, so none of them moves.
    assert again.traffic.pages_hit == pages
    assert (again.traffic.pages_sent, again.traffic.page_bytes_sent) == (0, 0)
    assert again.traffic.images_encoded == 0


async def test_a_client_that_leaves_frees_pages_and_slots(ray_cluster: RayCluster) -> None:
    async with GenerationClient(ray_cluster.address) as client:
        stream = client.generate(ask("A long answer that nobody waits for.", picture(12), 200))
        async for response in stream:
            if response.HasField("delta"):
                break
        held = await asyncio.to_thread(ray_cluster.workers, "decode")
        assert sum(report.status.pages_leased for report in held if report.status) > 0
        await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(ray_cluster.wait, "idle", ray_cluster.idle, 5.0)


async def test_everything_listens_on_loopback(ray_cluster: RayCluster) -> None:
    pids = [process.pid for process in descendants(ray_cluster.process.pid)] + [ray_cluster.process.pid]
    sockets = {inode for pid in pids for inode in socket_inodes(pid)}
    hosts = {host for inode, host in listening() if inode in sockets}
    assert hosts, "the test must see them"
    assert {host for host in hosts if not host.startswith("127.") and host not in ("::1",)} == set()


def socket_inodes(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir() if Path(f"/proc/{pid}/fd").exists() else ():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def listening() -> list[tuple[str, str]]:
    """(inode, address) of every listening TCP socket; IPv4-mapped addresses as IPv4."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A":
                continue
            digits = fields[1].split(":")[0]
            words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
            packed = struct.pack(f"={len(words)}I", *words)
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            host = socket.inet_ntop(family, packed).removeprefix("::ffff:")
            found.append((fields[9], host))
    return found
