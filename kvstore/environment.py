"""What a node takes from the machine that it runs on: clocks, network, threads, files, randomness.

A node decides nothing by itself about any of them: it is given one of these. The real one is the default; a
simulation brings virtual time, a network that loses messages, and disks that fill up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cedar.kvstore.clock import Clock, SystemClock
from cedar.kvstore.config import SsdConfig
from cedar.kvstore.page_store import PageStore
from cedar.kvstore.ssd_tier import SsdTier
from cedar.kvstore.state_file import StateFile, StateText
from cedar.kvstore.stats import Counters
from cedar.kvstore.transport import GrpcTransport, Transport


def _open_ssd(config: SsdConfig, clock: Clock, counters: Counters) -> PageStore:
    return SsdTier(config, clock=clock, counters=counters)


def _reader_threads(count: int) -> Executor:
    return ThreadPoolExecutor(count, thread_name_prefix="cedar-store-reader")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``open_pages``: the tier of pages, on a reader thread. ``readers``: so many threads that may block."""

    clock: Clock = field(default_factory=SystemClock)
    transport: Transport = field(default_factory=GrpcTransport)
    open_pages: Callable[[SsdConfig, Clock, Counters], PageStore] = _open_ssd
    readers: Callable[[int], Executor] = _reader_threads
    state_file: Callable[[Path], StateText] = StateFile
    rng: random.Random = field(default_factory=random.SystemRandom)
