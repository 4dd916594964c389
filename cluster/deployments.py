"""Serve deployments: each replica runs one worker in its own process and keeps it in the directory.

Serve owns the lifetime: it starts and replaces replicas, asks ``check_health``, collects
``record_autoscaling_stats`` and calls ``__del__`` when one has to go. Heavy imports happen in the
constructors, so that the processes do them side by side.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from cedar.cluster.announcer import Announcer
from cedar.cluster.autoscale_serve import WAITING, signals
from cedar.cluster.config import ClusterConfig, StageName, StageSettings
from cedar.cluster.directory import Load, Worker
from cedar.cluster.directory_client import RayDirectory
from cedar.cluster.serve_port import keep_on_loopback


def listen_host(host: str) -> str:
    """The interface to listen on: as configured, "node" being this node's own address."""
    if host != "node":
        return host
    import ray

    return str(ray.util.get_node_ip_address())


class StageReplica:
    """What the three stages share. Subclasses make the worker."""

    name: StageName

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits constructors
        keep_on_loopback()
        self._settings: StageSettings = config.stage(self.name)
        self._worker = self._make(config, listen_host(self._settings.host))
        self._address = await self._worker.start()
        follow_store = self._worker.set_store if self.name != "encoder" else None
        self._announcer = Announcer(
            RayDirectory(config.ray.namespace), self._describe, config.directory.heartbeat_s, follow_store
        )
        await self._announcer.announce()
        self._announcer.start()

    def _make(self, config: ClusterConfig, host: str) -> Any:
        raise NotImplementedError

    def _describe(self) -> Worker:
        return describe(self._worker.status(), self._address)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._worker.healthy() or self._announcer.failed:
            raise RuntimeError(f"the {self.name} worker at {self._address} is not healthy; its log says why")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The planner's readings."""
        return signals(self._describe().load)

    async def __del__(self) -> None:
        """Serve's goodbye: refuse new work, say so, finish what runs, free, close."""
        if not hasattr(self, "_announcer"):
            return
        draining = asyncio.create_task(self._worker.drain(self._settings.drain_s))
        await asyncio.sleep(0)
        await self._announcer.announce()
        await draining
        await self._announcer.stop()
        await self._worker.stop(drain_s=0)


class EncoderReplica(StageReplica):
    """One vision worker."""

    name = "encoder"

    def _make(self, config: ClusterConfig, host: str) -> Any:
        from cedar.actors.encoder_worker import EncoderWorker
        from cedar.cluster.worker_configs import encoder_config

        return EncoderWorker(encoder_config(config, host))


class PrefillReplica(StageReplica):
    """One prefill worker."""

    name = "prefill"

    def _make(self, config: ClusterConfig, host: str) -> Any:
        from cedar.actors.prefill_worker import PrefillWorker
        from cedar.cluster.worker_configs import prefill_config

        return PrefillWorker(prefill_config(config, host))


class DecodeReplica(StageReplica):
    """One decode worker."""

    name = "decode"

    def _make(self, config: ClusterConfig, host: str) -> Any:
        from cedar.actors.decode_worker import DecodeWorker
        from cedar.cluster.worker_configs import decode_config

        return DecodeWorker(decode_config(config, host))


class GatewayReplica:
    """The public endpoint. ``stages``: handles that make the stages part of this application; never
    called."""

    async def __init__(self, config: ClusterConfig, secret_directory: str | None, *stages: object) -> None:  # type: ignore[misc]
        from cedar.cluster.gateway import Gateway
        from cedar.cluster.tenants import Tenants, load_keys, load_secret

        keep_on_loopback()
        auth = config.gateway.auth
        tenants = Tenants(
            load_secret(auth, secret_directory), default=auth.default_tenant, keys=load_keys(auth)
        )
        directory = RayDirectory(config.ray.namespace)
        self._drain_s = config.decode.drain_s
        self._gateway = Gateway(config, directory, tenants)
        await self._gateway.start()
        self._announcer = Announcer(directory, self._gateway.describe, config.directory.heartbeat_s)
        await self._announcer.announce()
        self._announcer.start()

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._gateway.healthy() or self._announcer.failed:
            raise RuntimeError("the gateway no longer follows the directory; its log says why")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests that no worker of a stage takes: load that the stages cannot see."""
        waiting = self._gateway.service.waiting
        return {WAITING + stage: float(waiting[stage]) for stage in ("encoder", "prefill", "decode")}

    async def __del__(self) -> None:
        """Serve's goodbye."""
        if not hasattr(self, "_announcer"):
            return
        await self._announcer.stop()
        await self._gateway.stop(self._drain_s)


def describe(status: Any, address: str) -> Worker:
    """A worker's status as its announcement."""
    return Worker(
        stage=status.stage,
        address=address,
        incarnation=status.incarnation,
        pid=status.pid or os.getpid(),
        fingerprint=bytes(status.fingerprint),
        draining=status.draining,
        load=Load(
            active=status.active,
            queued=status.queued,
            pages_total=status.pages_total,
            pages_leased=status.pages_leased,
            slots_total=status.slots_total,
            slots_leased=status.slots_leased,
        ),
    )
