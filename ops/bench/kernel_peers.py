"""Kernels of others beside ours: which there are, and why one is not measured.

``python -m cedar.ops.bench.kernels --peers`` times each peer that can be imported and our kernel of the same
work in one process, on the same inputs, by the same graph replays; a row of its own names every other one and
why it was left out. Folders named by ``CEDAR_BENCH_PEERS`` (separated like ``PATH``) are searched first: what
``pip install --target`` made, so that a peer needs no place in Cedar's own environment.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

FOLDERS = "CEDAR_BENCH_PEERS"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One peer: the module that it is imported by, and where its cases are."""

    title: str
    module: str
    cases: str  # module:function, called with the imported module
    capability: int  # the major compute capability that its kernels here are for


PEERS = {
    "flash_mla": Peer(
        title="FlashMLA",
        module="flash_mla",
        cases="cedar.ops.bench.kernel_cases_flash_mla:cases",
        capability=9,
    ),
    "flashinfer": Peer(
        title="flashinfer",
        module="flashinfer",
        cases="cedar.ops.bench.kernel_cases_flashinfer:cases",
        capability=9,
    ),
    "deep_gemm": Peer(
        title="DeepGEMM",
        module="deep_gemm",
        cases="cedar.ops.bench.kernel_cases_deep_gemm:cases",
        capability=9,
    ),
    "tilelang": Peer(
        title="SGLang's TileLang kernel",
        module="sglang.kernels.ops.attention.dsa.tilelang_kernel",
        cases="cedar.ops.bench.kernel_cases_tilelang:cases",
        capability=9,
    ),
}


class PeerMissing(RuntimeError):
    """A peer that cannot be measured here; the message says why."""


def load(name: str) -> ModuleType:
    """Imports a peer. Raises PeerMissing, naming it and why, whatever its import fails with."""
    peer = PEERS[name]
    folders = [folder for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    try:
        return import_module(peer.module)
    except ModuleNotFoundError as error:
        if error.name and f"{peer.module}.".startswith(f"{error.name}."):
            searched = f"; searched {', '.join(folders)} too" if folders else ""
            raise PeerMissing(f"{peer.title} is not installed{searched}") from error
        raise PeerMissing(f"{peer.title} needs the module {error.name}, which is not installed") from error
    except Exception as error:
        cause = error.__cause__ or error
        what = f"{type(cause).__name__}: {str(cause)[:300]}"
        raise PeerMissing(f"{peer.title} does not load: {what}") from error


def usable(name: str, capability: int) -> ModuleType:
    """The peer's module, for a card of this major compute capability. Raises PeerMissing."""
    peer = PEERS[name]
    if capability != peer.capability:
        raise PeerMissing(
            f"{peer.title}: the kernels compared here are for compute capability {peer.capability}.x, "
            f"this card's is {capability}.x"
        )
    return load(name)


def left_out(name: str, why: Exception) -> dict[str, Any]:
    """The row of a peer that was not measured."""
    return {"operation": PEERS[name].title, "shape": "", "note": f"not run: {why}", "left_out": True}


def missing_peers() -> list[dict[str, Any]]:
    """Rows of the peers that cannot be imported here, card or not."""
    rows = []
    for name in PEERS:
        try:
            load(name)
        except PeerMissing as why:
            rows.append(left_out(name, why))
    return rows
