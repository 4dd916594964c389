"""The gateway process: fleet, store look-up and the Generation service behind one gRPC server."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Any

import grpc
from cedar.actors.prompts import PromptTools
from cedar.cluster.config import ClusterConfig
from cedar.cluster.directory import Load, Worker
from cedar.cluster.directory_client import Directory
from cedar.cluster.errors import PortInUse
from cedar.cluster.fleet import Fleet
from cedar.cluster.generation import GenerationService
from cedar.cluster.stage_calls import CANCEL_TIMEOUT_S, WORKER
from cedar.cluster.store_lookup import StoreLookup
from cedar.cluster.tenants import Tenants
from cedar.cluster.worker_configs import store_tls
from cedar.kvstore.rpc import add_health, server_options, service_handler
from cedar.v1 import generation_pb2, stages_pb2

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
FREE_S = 2 * CANCEL_TIMEOUT_S


class Gateway:
    """``start()`` loads the tokenizer and listens; ``stop()`` drains and closes. Used on one event loop."""

    def __init__(self, config: ClusterConfig, directory: Directory, tenants: Tenants) -> None:
        self._config = config
        self._tenants = tenants
        self._directory = directory
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._address = ""
        self.incarnation = secrets.randbits(62) | 1
        self.fleet = Fleet(directory, config.directory)

    async def start(self) -> str:
        """Listen. Returns "host:port"; raises ``PortInUse``."""
        settings = self._config.gateway
        tools = await asyncio.to_thread(
            PromptTools.load,
            self._config.model.path,
            self._config.model.page_tokens,
            max_images=settings.max_images,
            max_image_bytes=settings.max_image_bytes,
            max_image_pixels=settings.max_image_pixels,
        )
        timeout_s, tls = self._config.deadlines.store_s, store_tls(self._config)
        self.store = StoreLookup(self.fleet, tools.fingerprint, timeout_s, tls)
        self.service = GenerationService(self._config, tools, self._tenants, self.fleet, self.store)
        server = grpc.aio.server(options=server_options(settings.max_request_bytes))
        server.add_generic_rpc_handlers(
            (service_handler(GENERATION, self.service), service_handler(WORKER, self))
        )
        self._health = add_health(server, [GENERATION, WORKER])
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            port = server.add_insecure_port(f"{host}:{settings.port}")
        except RuntimeError:
            port = 0
        if port == 0:
            raise PortInUse(settings.host, settings.port)
        if settings.metrics_port is not None:
            try:
                self.service.prompts.serve(settings.metrics_port)
            except OSError:
                raise PortInUse("127.0.0.1", settings.metrics_port, "gateway.metrics_port") from None
        await self.fleet.start()
        await server.start()
        self._server = server
        self._address = f"{host}:{port}"
        return self._address

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let the running ones end for ``drain_s``, then cancel them. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self.service.draining = True
        await self._health.enter_graceful_shutdown()
        await server.stop(grace=drain_s)
        await self.service.ended(FREE_S)  # cancelled calls still tell the stages to let go
        await self.store.close()
        await self.fleet.stop()
        self.service.close()

    def healthy(self) -> bool:
        """Whether it serves and follows the directory."""
        return self._server is not None and self.fleet.following

    @property
    def load(self) -> Load:
        """Requests in the stages, and waiting for room."""
        return Load(active=self.service.admission.active, queued=self.service.admission.waiting)

    def describe(self) -> Worker:
        """This gateway's announcement."""
        return Worker(
            stage="gateway",
            address=self._address,
            incarnation=self.incarnation,
            pid=os.getpid(),
            draining=self.service.draining,
            load=self.load,
        )

    async def GetStatus(
        self, request: stages_pb2.WorkerStatusRequest, context: Any
    ) -> stages_pb2.WorkerStatus:
        """See stages.proto."""
        service = self.service
        counters = {name: float(value) for name, value in service.counters.items()}
        prompts = service.prompts.totals()
        counters |= {
            field.name: float(getattr(prompts, field.name))
            for field in prompts.DESCRIPTOR.fields
            if field.name.endswith("_tokens")
        }
        return stages_pb2.WorkerStatus(
            stage="gateway",
            incarnation=self.incarnation,
            pid=os.getpid(),
            active=self.load.active,
            queued=self.load.queued,
            draining=service.draining,
            counters={
                **counters,
                "refused": float(service.admission.refused),
                "store_errors": float(self.store.misses_by_error),
                "directory_age_s": self.fleet.view_age_s,
                "workers": float(len(self.fleet.view.workers)),
            },
        )
