"""Whole histories of a store under faults, in virtual time: no promise is broken, and in the end it hits
again.

A failing seed prints itself and what happened. To replay it: ``CEDAR_SIM_SEED=123 pytest tests/simulation``.
For a long run: ``CEDAR_SIM_SEEDS=5000 pytest tests/simulation/test_simulation.py``, from ``CEDAR_SIM_FROM``
on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_cluster import Simulation

HERE = Path(__file__).parent
FIRST = int(os.environ.get("CEDAR_SIM_FROM", "0"))
COUNT = int(os.environ.get("CEDAR_SIM_SEEDS", "2"))
SEEDS = [int(os.environ["CEDAR_SIM_SEED"])] if "CEDAR_SIM_SEED" in os.environ else range(FIRST, FIRST + COUNT)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_promise_is_broken(seed: int) -> None:
    simulation = Simulation(seed).run()
    assert simulation.counts["pages_read"] > 100, "a history in which little is read shows little"
    assert sum(count for name, count in simulation.counts.items() if name.startswith("_")) >= 5, "few faults"


def test_without_faults_everything_is_a_hit() -> None:
    simulation = Simulation(1, chaos_s=12.0, calm=True).run()
    counts = simulation.counts
    assert counts["pages_refused"] == 0
    first_time = sum(len(writes) == 1 for writes in simulation.model.writes.values())
    assert counts["pages_asked"] - counts["pages_read"] <= 1.5 * len(simulation.model.writes)
    assert first_time > 0.6 * len(simulation.model.writes), "hardly a page was computed twice"


def digest(seed: int) -> str:
    simulation = Simulation(seed, chaos_s=8.0).run()
    told = "\n".join([*simulation.story, repr(simulation.counts), str(simulation.network.sent)])
    return hashlib.sha256(told.encode()).hexdigest()


def test_a_seed_is_the_same_history_each_time() -> None:
    """In another process too, where strings and bytes are hashed differently."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_simulation import digest; print(digest(7))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    other = subprocess.run(
        [sys.executable, "-c", script, str(HERE)], env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == digest(7)
