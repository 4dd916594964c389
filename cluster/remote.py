"""Looks at a running cluster from another process, and ends it. gRPC and ``/proc`` only, no Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import yaml
from cedar.cluster import state_file
from cedar.cluster.errors import LaunchError
from cedar.cluster.processes import ProcessId, end_session, wait_gone
from cedar.cluster.stage_calls import WORKER
from cedar.cluster.state_file import ClusterState, WorkerEntry
from cedar.kvstore.rpc import ServiceStub, channel_options
from cedar.v1 import generation_pb2 as generation
from cedar.v1 import stages_pb2 as stages
from cedar.v1 import store_pb2 as store
from google.protobuf.descriptor import ServiceDescriptor

STORE = store.DESCRIPTOR.services_by_name["Store"]
GENERATION = generation.DESCRIPTOR.services_by_name["Generation"]


@dataclass(frozen=True)
class WorkerReport:
    """One worker's answer. ``error`` says why there is none."""

    entry: WorkerEntry
    status: stages.WorkerStatus | None = None
    store: dict[str, float] | None = None
    error: str = ""


@dataclass(frozen=True)
class ClusterStatus:
    """Every worker's answer. ``model`` is None when the gateway does not answer."""

    state: ClusterState
    model: generation.GetModelResponse | None
    workers: tuple[WorkerReport, ...]

    @property
    def ready(self) -> bool:
        """Whether everyone answers."""
        return self.model is not None and all(not report.error for report in self.workers)


def status(state: ClusterState, timeout_s: float = 2.0) -> ClusterStatus:
    """Ask all workers at once. Never raises for one that does not answer."""
    tls = _store_tls(state)
    with ThreadPoolExecutor(max(1, min(32, len(state.workers)))) as pool:
        reports = tuple(pool.map(lambda entry: _report(entry, timeout_s, tls), state.workers))
    model = None
    with contextlib.suppress(grpc.RpcError), _stub(state.address, GENERATION) as stub:
        model = stub.GetModel(generation.GetModelRequest(), timeout=timeout_s)
    return ClusterStatus(state, model, reports)


def stop(state: ClusterState, timeout_s: float = 60.0) -> None:
    """Ask the owner to end its cluster and wait for it; clean up after an owner that is gone.

    Raises ``LaunchError`` when processes are left.
    """
    if state.owner_alive:
        os.kill(state.pid, signal.SIGTERM)
        if wait_gone([ProcessId(state.pid, state.pid_started)], timeout_s):
            raise LaunchError("serve", f"process {state.pid} has not ended its cluster after {timeout_s:g} s")
    left = end_session(state.ray_temp_dir, grace_s=3.0) if state.ray_temp_dir else []
    if state.ray_temp_dir:
        shutil.rmtree(state.ray_temp_dir, ignore_errors=True)
    state_file.remove(state.name)
    if left:
        raise LaunchError("ray", f"processes that would not end: {[process.pid for process in left]}")


@contextlib.contextmanager
def _stub(
    address: str, service: ServiceDescriptor, tls: Mapping[str, str] | None = None
) -> Iterator[ServiceStub]:
    with _channel(address, tls) as channel:
        yield ServiceStub(channel, service)


def _channel(address: str, tls: Mapping[str, str] | None) -> grpc.Channel:
    options = channel_options()
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    pems = [Path(tls[name]).read_bytes() for name in ("ca_file", "key_file", "certificate_file")]
    if tls.get("server_name"):
        options = [*options, ("grpc.ssl_target_name_override", tls["server_name"])]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*pems), options=options)


def _store_tls(state: ClusterState) -> Mapping[str, str] | None:
    config = yaml.safe_load(state.config_yaml) or {}
    tls: Mapping[str, str] | None = (config.get("store") or {}).get("tls")
    return tls


def _report(entry: WorkerEntry, timeout_s: float, tls: Mapping[str, str] | None) -> WorkerReport:
    try:
        if entry.stage == "store":
            with _stub(entry.address, STORE, tls) as stub:
                answer = stub.Stats(store.StatsRequest(), timeout=timeout_s)
            return WorkerReport(entry, store=dict(answer.values))
        with _stub(entry.address, WORKER) as stub:
            return WorkerReport(entry, status=stub.GetStatus(stages.WorkerStatusRequest(), timeout=timeout_s))
    except grpc.RpcError as error:
        code = getattr(error, "code", None)
        return WorkerReport(entry, error=code().name.lower() if callable(code) else str(error))
    except OSError as error:
        return WorkerReport(entry, error=f"store.tls: {error.filename}: {error.strerror}")
