"""Fixtures: the cluster in one process, the one on Ray, and the plain network."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from cedar.actors.prompts import PromptTools
from cedar.cluster.client import GenerationClient

from .golden_preset import GOLDEN, PAGE_TOKENS
from .in_process import Stack, idle, local_config, running
from .ray_cluster import RayCluster
from .single_process import SingleProcess


# One event loop a module: a worker belongs to the loop that started it, and some stacks are shared.
@pytest_asyncio.fixture(loop_scope="module")
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running(local_config(), tmp_path / "store") as stack:
        yield stack
        await idle(stack)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(local_config(), tmp_path_factory.mktemp("store")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[GenerationClient]:
    async with GenerationClient(stack.address, api_key="key-a") as client:
        yield client


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One cluster on a real Ray for the whole session. Its window tier holds one record."""
    overrides = ("gateway.port=0", "store.window_bytes=24000", "decode.autoscaling.max=2")
    cluster = RayCluster(tmp_path_factory.mktemp("ray"), *overrides)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def tools() -> PromptTools:
    return PromptTools.load(str(GOLDEN), PAGE_TOKENS)


@pytest.fixture(scope="session")
def single() -> SingleProcess:
    return SingleProcess(str(GOLDEN), PAGE_TOKENS)
