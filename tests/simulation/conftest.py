"""The simulation's modules are found beside its tests; see ``simulated_cluster`` for what it is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Thousands of expected warnings a second of real time: the story of a failing seed says what counts."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
