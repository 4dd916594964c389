"""The golden checkpoint and its tensors, opened once for the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cedar.model import load_network
from cedar.model.network import Network
from cedar.model.state import KVMemory
from safetensors.torch import load_file

from .sequences import leftover_memory

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def network() -> Network:
    return load_network(GOLDEN)


@pytest.fixture(scope="session")
def drafting() -> Network:
    """With the draft module."""
    return load_network(GOLDEN, drafting=True)


@pytest.fixture(scope="session")
def expected() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="session")
def expected_ced() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected_ced.safetensors")


@pytest.fixture
def memory(network: Network) -> KVMemory:
    return leftover_memory(network)
