"""Fixtures of the in-process cluster (``in_process``)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cedar.cluster.client import GenerationClient

from .in_process import Stack, idle, local_config, running


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
