"""The simulation can fail: each decision that is broken here on purpose is found by some seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cedar.kvstore import cluster_service, page_wire, peer_service, peers, rebalance
from cedar.kvstore.purges import Purges
from cedar.kvstore.replication import Replication
from simulated_cluster import Simulation
from store_model import Violation

SEEDS = int(os.environ.get("CEDAR_SIM_MUTATION_SEEDS", "12"))
Patch = pytest.MonkeyPatch


def ignore_tombstones(patch: Patch) -> None:
    """Pages of before a purge are taken from nodes that do not know of it."""
    patch.setattr(Purges, "covered", lambda self, tenant, ids: True)


def forget_to_tell_purges(patch: Patch) -> None:
    """A node that was away does not hear of purges."""
    patch.setattr(Purges, "unknown", lambda self, message: ())


def skip_the_epoch_check(patch: Patch) -> None:
    """Requests of any list are served by any node."""

    async def nothing(*_: Any) -> None:
        return

    patch.setattr(cluster_service, "expect_epoch", nothing)
    patch.setattr(peer_service, "expect_epoch", nothing)


def trust_replicas(patch: Patch) -> None:
    """What another node sends is stored as it came."""
    patch.setattr(peers, "verify_value", lambda value, **_: None)


def trust_answers(patch: Patch) -> None:
    """A client takes what a node sends as it came."""
    patch.setattr(page_wire, "verify_value", lambda value, **_: None)


def settle_without_answers(patch: Patch) -> None:
    """A node is settled though others did not say what they hold."""
    real = rebalance.Rebalance._settle

    async def settle(self: rebalance.Rebalance, members: Any) -> bool:
        await real(self, members)
        return True

    patch.setattr(rebalance.Rebalance, "_settle", settle)


def keep_handed_over_pages(patch: Patch) -> None:
    """What a client put at the second holder never reaches the owner, and hot pages stay alone."""

    async def send(self: Replication, tag: bytes) -> bool:
        return True

    patch.setattr(Replication, "_send", send)


@dataclass(frozen=True)
class Found:
    """By this seed, of a history with these faults; code that changes may move it by a few seeds."""

    seed: int
    faults: tuple[str, ...]
    purges: float = 0.0
    chaos_s: float = 10.0


FOUND_BY: dict[Callable[[Patch], None], Found] = {
    ignore_tombstones: Found(4, ("_cut",), 0.1, chaos_s=25.0),
    forget_to_tell_purges: Found(0, ("_crash",), 0.1),
    skip_the_epoch_check: Found(0, ("_isolate", "_restart_politely")),
    trust_replicas: Found(2, ("_bad_weather", "_restart_politely", "_wipe"), chaos_s=8.0),
    trust_answers: Found(0, ("_bad_weather",), chaos_s=8.0),
    settle_without_answers: Found(2, ("_cut", "_crash")),
    keep_handed_over_pages: Found(0, ("_cut",), chaos_s=6.0),
}


@pytest.mark.parametrize("mutation", FOUND_BY)
def test_a_broken_decision_is_found(
    mutation: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    found = FOUND_BY[mutation]
    for seed in range(found.seed, found.seed + SEEDS):
        try:
            Simulation(seed, chaos_s=found.chaos_s, only=found.faults, purges=found.purges).run()
        except Violation:
            return
    pytest.fail(f"none of {SEEDS} seeds from {found.seed} on finds it")
