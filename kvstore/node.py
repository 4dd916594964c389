"""One store node: ``python -m cedar.kvstore.node --directory DIR`` runs it; StoreNode embeds it.

The node owns its directory, serves gRPC with health and reflection, and stops gracefully: it turns unhealthy,
lets calls in flight end, commits what is queued, and gives the directory free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from cedar.kvstore.admin import ADMIN_SERVICE, AdminService
from cedar.kvstore.clock import Clock
from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.cluster_part import ClusterPart
from cedar.kvstore.cluster_service import ClusterStoreService
from cedar.kvstore.config import GIB, HOUR_S, MIB, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.environment import Environment
from cedar.kvstore.errors import InvalidRequest, StoreLocked
from cedar.kvstore.machine import keep_freed_memory, use_one_large_heap
from cedar.kvstore.member_feed import MemberFeed
from cedar.kvstore.metrics import StoreMetrics
from cedar.kvstore.peer_service import StorePeerService
from cedar.kvstore.rpc import transport_options
from cedar.kvstore.stats import Counters
from cedar.kvstore.tenant_purge import PEER_SERVICE
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.transport import GrpcTransport, PortInUse
from cedar.kvstore.window_tier import WindowTier
from cedar.v1 import store_pb2

log = logging.getLogger(__name__)
SERVICE = store_pb2.DESCRIPTOR.services_by_name["Store"]


class StoreNode:
    """A store node inside this process: ``await start()``, later ``await stop()``.

    ``peers``: its part in a cluster of nodes. ``feed``: where it learns of the others, when whoever runs the
    node publishes the member list itself. ``environment``: the machine, if it is not this one.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        peers: PeerConfig | None = None,
        feed: MemberFeed | None = None,
        clock: Clock | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.config = config
        self._peers = peers or PeerConfig()
        self._feed = feed
        self.counters = Counters()
        self.address = ""
        self.running = False
        self.metrics: StoreMetrics | None = None
        self.metrics_port = 0
        environment = environment or Environment(transport=GrpcTransport(config.tls))
        self._environment = environment if clock is None else replace(environment, clock=clock)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Open the tiers and serve; the address, "host:port". StoreLocked, PortInUse."""
        loop = asyncio.get_running_loop()
        config = self.config
        machine = self._environment
        self.windows = WindowTier(config.window, machine.clock, self.counters)
        self._readers = machine.readers(config.read_threads)
        try:
            self.ssd = await loop.run_in_executor(
                self._readers, machine.open_pages, config.ssd, machine.clock, self.counters
            )
        except BaseException:
            self._readers.shutdown(wait=False)
            raise
        options = transport_options(
            max_message_bytes=config.max_message_bytes,
            keepalive_s=config.keepalive_s,
            keepalive_timeout_s=config.keepalive_timeout_s,
        )
        self._server = machine.transport.server(options.server)
        try:
            self.part = ClusterPart(
                config,
                self._peers,
                environment=machine,
                ssd=self.ssd,
                windows=self.windows,
                readers=self._readers,
                counters=self.counters,
                feed=self._feed,
            )
        except BaseException:
            await self._close_tiers()
            raise
        try:
            port = self._server.listen(config.host, config.port)
            await self.part.prepare()
            self._serve_metrics()
        except BaseException:
            await self.part.stop()
            await self._close_tiers()
            raise
        self.service = service = ClusterStoreService(
            self.part, config, self.ssd, self.windows, self._readers, self.counters
        )
        peer_service = StorePeerService(self.part, service, self.windows)
        admin = AdminService(config, self.ssd, self.windows, self._readers, self.counters, self.part)
        services = ((SERVICE, service), (PEER_SERVICE, peer_service), (ADMIN_SERVICE, admin))
        self._server.add(services)
        await self._server.start()
        self._tasks.append(loop.create_task(self._expire_windows()))
        self.address = f"{config.host}:{port}"
        await self.part.start(self.address)
        self.running = True
        return self.address

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Be read but not written to, until the other nodes hold what is theirs now; whether they do."""
        return await self.part.drain(self._peers.drain_timeout_s if timeout_s is None else timeout_s)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, give those in flight ``grace_s``, commit, close, unlock. May be called again."""
        if not self.running:
            return
        self.running = False
        await self._server.retire()
        await self.part.leave()
        await self._server.stop(grace_s)
        await self.part.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_tiers()

    async def _close_tiers(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._readers, self.ssd.close)
        self._readers.shutdown(wait=True)
        if self.metrics is not None:
            await loop.run_in_executor(None, self.metrics.close)

    def _serve_metrics(self) -> None:
        """Answer Prometheus, when configured to. PortInUse."""
        config = self.config
        if config.metrics_port is None:
            return
        self.metrics = StoreMetrics(self._gauges, self.ssd.tenant_bytes, self.ssd.page_tokens())
        try:
            self.metrics_port = self.metrics.serve(config.metrics_port, config.metrics_host)
        except OSError as error:
            where = f"{config.metrics_host}:{config.metrics_port}"
            raise PortInUse(f"cannot serve metrics on {where}: {error.strerror}") from None
        self.counters.observer = self.metrics

    def _gauges(self) -> dict[str, float]:
        return self.ssd.stats() | self.windows.stats() | self.part.replication.stats()

    async def _expire_windows(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.windows.expire()


def parse_arguments(argv: list[str] | None = None) -> tuple[NodeConfig, PeerConfig]:
    """The node's configuration from the command line. InvalidRequest names what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m cedar.kvstore.node", description=__doc__)
    add = parser.add_argument
    add("--directory", type=Path, required=True, help="where pages are kept; one process a directory")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: any free port, printed at start")
    add("--capacity-gib", type=float, default=64.0, help="disk that pages may take (default 64)")
    add("--ttl-hours", type=float, default=72.0, help="how long a page lives after its last use (default 72)")
    add("--segment-mib", type=float, default=0.0, help="size of a segment (default: capacity / 24)")
    add("--durability", choices=("batch", "none"), default="batch")
    add("--reserve-mib", type=float, default=256.0, help="free disk never used (default 256)")
    add("--window-mib", type=float, default=0.0, help="DRAM for window state (default: a tenth of memory)")
    add("--window-ttl-s", type=float, default=600.0)
    add("--node-id", default="", help="its name in a cluster (default: made once, kept in the directory)")
    add("--advertise", default="", help="address that others reach it under (default: HOST:PORT)")
    add(
        "--membership",
        default="",
        metavar="ADDRESS",
        help="of the membership service",
    )
    add("--peers", nargs="+", default=(), metavar="ADDRESS", help="or all nodes, if they never change")
    add("--members-file", type=Path, help="or the file that lists the nodes")
    add("--weight", type=float, default=1.0, help="share of pages relative to other nodes (default 1)")
    add("--copies", type=int, default=2, help="nodes that hold what is hit often (default 2)")
    add("--copy-after-hits", type=int, default=3, help="how often that is (default 3; 0: everything)")
    add("--copy-mib-per-s", type=float, default=32.0, help="bandwidth for copies (default 32)")
    add(
        "--move-mib-per-s",
        type=float,
        default=32.0,
        help="bandwidth for moved pages (default 32)",
    )
    add("--metrics-port", type=int, help="answer Prometheus here, on loopback; 0: any free port")
    add("--grace-s", type=float, default=5.0, help="time for calls in flight when it stops (default 5)")
    add("--max-reads", type=int, default=64, help="GetPages calls at a time (default 64)")
    add("--tls", nargs=3, type=Path, metavar=("CA", "CERTIFICATE", "KEY"), help="PEM files: mutual TLS")
    add("--fingerprint", action="append", default=[], metavar="HEX", help="take only this model's pages")
    arguments = parser.parse_args(argv)
    node = NodeConfig(
        ssd=SsdConfig(
            directory=arguments.directory,
            capacity_bytes=int(arguments.capacity_gib * GIB),
            ttl_s=arguments.ttl_hours * HOUR_S,
            segment_bytes=int(arguments.segment_mib * MIB),
            durability=arguments.durability,
            reserve_bytes=int(arguments.reserve_mib * MIB),
        ),
        window=WindowConfig(budget_bytes=int(arguments.window_mib * MIB), ttl_s=arguments.window_ttl_s),
        host=arguments.host,
        port=arguments.port,
        fingerprints=tuple(bytes.fromhex(text) for text in arguments.fingerprint),
        max_reads=arguments.max_reads,
        grace_s=arguments.grace_s,
        metrics_port=arguments.metrics_port,
        tls=TlsConfig.of(arguments.tls),
    )
    peers = PeerConfig(
        node_id=arguments.node_id,
        advertise=arguments.advertise,
        membership=arguments.membership,
        members_file=arguments.members_file,
        peers=tuple(arguments.peers),
        weight=arguments.weight,
        copies=arguments.copies,
        copy_after_hits=arguments.copy_after_hits,
        copy_bytes_per_s=int(arguments.copy_mib_per_s * MIB),
        move_bytes_per_s=int(arguments.move_mib_per_s * MIB),
    )
    return node, peers


async def serve(config: NodeConfig, peers: PeerConfig | None = None) -> None:
    """Run a node until SIGTERM or SIGINT; prints one JSON line when it serves. SIGUSR1: drain, then stop."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    draining = asyncio.Event()

    def drain() -> None:
        draining.set()
        stopping.set()

    loop.add_signal_handler(signal.SIGUSR1, drain)
    node = StoreNode(config, peers=peers)
    address = await node.start()
    print(json.dumps({"address": address, "pid": os.getpid(), "node_id": node.part.node_id}), flush=True)
    await stopping.wait()
    if draining.is_set():
        await node.drain()
    await node.stop(config.grace_s)


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit status 2 with one clear line when the node cannot start."""
    keep_freed_memory()
    use_one_large_heap()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(*parse_arguments(argv)))
    except (InvalidRequest, StoreLocked, PortInUse, OSError, ValueError) as error:
        print(f"store node: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
