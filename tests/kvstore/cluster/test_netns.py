"""Nodes in network namespaces of their own; one is partitioned from everybody by taking its link down."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NODES = ("a", "b", "c")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """A hub namespace with a link to the namespace of each node; the hub forwards between them."""

    def __init__(self) -> None:
        self.prefix = f"cdr{os.getpid() % 100000}"
        self.hub = f"{self.prefix}h"
        self.made: list[str] = []

    def build(self) -> None:
        self.add(self.hub)
        for number, node in enumerate(NODES, start=1):
            space = self.space(node)
            self.add(space)
            ip("-n", self.hub, "link", "add", f"to-{node}", "type", "veth", "peer", "eth", "netns", space)
            ip("-n", self.hub, "address", "add", f"10.77.{number}.1/30", "dev", f"to-{node}")
            ip("-n", self.hub, "link", "set", f"to-{node}", "up")
            ip("-n", space, "address", "add", f"10.77.{number}.2/30", "dev", "eth")
            ip("-n", space, "link", "set", "eth", "up")
            ip("-n", space, "route", "add", "default", "via", f"10.77.{number}.1")
        ip("netns", "exec", self.hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def add(self, space: str) -> None:
        ip("netns", "add", space)
        self.made.append(space)
        ip("-n", space, "link", "set", "lo", "up")

    def space(self, node: str) -> str:
        return f"{self.prefix}{node}"

    def link(self, node: str, state: str) -> None:
        ip("-n", self.hub, "link", "set", f"to-{node}", state)

    def inside(self, space: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", space)

    def remove(self) -> None:
        for space in self.made:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    network = Network()
    try:
        network.build()
    except subprocess.CalledProcessError as error:
        network.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    yield network
    network.remove()


class Driver:
    """The client in the hub."""

    def __init__(self, program: Any) -> None:
        self.process = program.process

    async def ask(self, command: str) -> tuple[Any, float]:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "the driver has died"
        answer, took_s = json.loads(line)
        return answer, took_s

    async def until(self, command: str, answer: Any, within_s: float = 20.0) -> None:
        for _ in range(int(within_s / 0.1)):
            if (await self.ask(command))[0] == answer:
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"{command} never became {answer}: {await self.ask(command)}")


async def test_a_partitioned_node_is_passed_over_and_comes_back(network: Network, programs: Any) -> None:
    service = programs.service("--host", "0.0.0.0", prefix=network.inside(network.hub))
    await programs.ready(service)
    port = service.address.rsplit(":", 1)[1]
    nodes = [
        programs.node(
            node, f"10.77.{number}.1:{port}", "--host", f"10.77.{number}.2", "--copy-after-hits", "0",
            prefix=network.inside(network.space(node)),
        )
        for number, node in enumerate(NODES, start=1)
    ]  # fmt: skip
    await programs.ready(*nodes)
    driver = Driver(
        programs.script(
            Path(__file__).parent / "netns_driver.py",
            f"10.77.1.1:{port}",
            prefix=network.inside(network.hub),
        )
    )
    await driver.until("members", ["a", "b", "c"])
    assert (await driver.ask("put 0"))[0] == 96
    await driver.until("pages", 192)

    network.link("b", "down")
    for command in ("match 0", "read 0", "match 0", "read 0"):
        answer, took_s = await driver.ask(command)
        assert (command, answer) == (command, 96)
        assert took_s < 4.0
    answer, took_s = await driver.ask("put 1")
    assert answer == 96, "what b would own goes to the next holder"
    await driver.until("members", ["a", "c"])
    assert (await driver.ask("read 1"))[0] == 96
    assert (await driver.ask("put 2"))[0] == 96

    network.link("b", "up")
    await driver.until("members", ["a", "b", "c"])
    for salt in (0, 1, 2):
        assert (await driver.ask(f"match {salt}"))[0] == 96
        assert (await driver.ask(f"read {salt}"))[0] == 96
