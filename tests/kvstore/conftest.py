"""Pages whose bytes follow from their key, so that any process can tell right from wrong."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import MIB, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.header import seal_value
from cedar.kvstore.keys import chain_keys, root_key
from cedar.kvstore.node import StoreNode
from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.ssd_tier import SsdTier

FINGERPRINT = hashlib.sha256(b"a model").digest()
PAGE_TOKENS = 32


class Chains:
    """Chains of small pages."""

    fingerprint = FINGERPRINT

    def root(self, tenant: str = "a") -> bytes:
        return root_key(b"test-format", FINGERPRINT, tenant.encode())

    def keys(self, pages: int, *, salt: int = 0, tenant: str = "a") -> list[bytes]:
        ids = [salt * 65_537 + i for i in range(pages * PAGE_TOKENS)]
        return chain_keys(self.root(tenant), ids, [], PAGE_TOKENS)

    def payload(self, key: bytes, size: int = 3392) -> bytes:
        return hashlib.shake_128(key).digest(size)

    def value(self, key: bytes, size: int = 3392) -> bytes:
        return seal_value(self.payload(key, size), fingerprint=FINGERPRINT, page_key=key, tokens=PAGE_TOKENS)

    def other_value(self, key: bytes, size: int = 3392) -> bytes:
        return seal_value(b"\1" * size, fingerprint=FINGERPRINT, page_key=key, tokens=PAGE_TOKENS)

    def items(self, keys: list[bytes], size: int = 3392) -> list[PutItem]:
        return [PutItem(key, self.value(key, size), index, b"tenant") for index, key in enumerate(keys)]


@pytest.fixture
def chains() -> Chains:
    return Chains()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class TierMaker:
    """Opens tiers that the fixture closes; by default small, on the manual clock, maintained by hand."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.directory = directory
        self.clock = clock
        self.tiers: list[SsdTier] = []

    def __call__(self, *, background: bool = False, **changes: Any) -> SsdTier:
        settings: dict[str, Any] = {
            "directory": self.directory,
            "capacity_bytes": 64 * MIB,
            "segment_bytes": 4 * MIB,
            "reserve_bytes": MIB,
            "commit_wait_s": 0.0,
            "usage_flush_s": 1e-9,
        }
        tier = SsdTier(SsdConfig(**settings | changes), clock=self.clock, background=background)
        self.tiers.append(tier)
        return tier

    def put(self, tier: SsdTier, items: list[PutItem]) -> PutCounts:
        return tier.put(items).result(30)


@pytest.fixture
def open_tier(tmp_path: Path, clock: ManualClock) -> Iterator[TierMaker]:
    maker = TierMaker(tmp_path / "store", clock)
    yield maker
    for tier in maker.tiers:
        tier.close()


NodeMaker = Callable[..., Any]


@pytest.fixture
def running_node(tmp_path: Path) -> NodeMaker:
    """An async context manager that runs a node with small limits."""

    @asynccontextmanager
    async def run(**changes: Any) -> AsyncIterator[StoreNode]:
        ssd = {"directory": tmp_path / "node", "capacity_bytes": 256 * MIB, "reserve_bytes": MIB}
        ssd |= changes.pop("ssd", {})
        window = {"budget_bytes": 8 * MIB} | changes.pop("window", {})
        clock = changes.pop("clock", None)
        config = NodeConfig(ssd=SsdConfig(**ssd), window=WindowConfig(**window), **changes)
        node = StoreNode(config, clock=clock)
        await node.start()
        try:
            yield node
            if node.running:
                node.ssd.check_integrity(deep=True)
                node.windows.check_integrity()
        finally:
            await node.stop(0.2)

    return run
