"""The SSD tier against a model, on real files: it returns what was put, in its time, by its tenant."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from cedar.kvstore.clock import ManualClock
from cedar.kvstore.config import HOUR_S, MIB, SsdConfig
from cedar.kvstore.header import seal_value
from cedar.kvstore.keys import chain_keys, root_key
from cedar.kvstore.put import PutItem
from cedar.kvstore.ssd_tier import SsdTier
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

F = b"f" * 32
TTL_S = 72 * HOUR_S
CHAINS = [chain_keys(root_key(b"x", F, bytes([tenant])), list(range(96)), [], 8) for tenant in range(4)]


def value(key: bytes) -> bytes:
    return seal_value(key * 100, fingerprint=F, page_key=key, tokens=8)


class TierMachine(RuleBasedStateMachine):
    """``used`` holds when the model last saw a use of a page that it knows to be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tier-machine-"))
        self.clock = ManualClock()
        self.used: dict[bytes, float] = {}
        self.damaged: set[bytes] = set()  # may be missing
        self.slack_s = 0.0  # a page may go this much before its time
        self.tier = self.open()

    def open(self) -> SsdTier:
        config = SsdConfig(
            directory=self.directory,
            capacity_bytes=64 * MIB,
            segment_bytes=MIB // 4,
            reserve_bytes=MIB,
            commit_wait_s=0.0,
            usage_flush_s=1e-9,
        )
        return SsdTier(config, clock=self.clock, background=False)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    @rule(chain=st.sampled_from(CHAINS), pages=st.integers(1, 12), first=st.integers(0, 11))
    def put(self, chain: list[bytes], pages: int, first: int) -> None:
        keys = chain[first : first + pages]
        counts = self.tier.put([PutItem(key, value(key), first + i) for i, key in enumerate(keys)]).result(30)
        assert counts.refused == counts.conflicts == 0
        for key in keys:
            self.used[key] = self.clock.monotonic_s()

    @rule(chain=st.sampled_from(CHAINS))
    def match(self, chain: list[bytes]) -> None:
        count = self.tier.match(chain)
        now_s = self.clock.monotonic_s()
        for key in chain[:count]:
            assert now_s < self.used[key] + TTL_S
            self.used[key] = now_s
        if count < len(chain) and chain[count] not in self.damaged:
            assert self.used.get(chain[count], float("-inf")) + TTL_S - self.slack_s <= now_s

    @rule(chain=st.sampled_from(CHAINS), first=st.integers(0, 11))
    def read(self, chain: list[bytes], first: int) -> None:
        keys = chain[first:]
        found = self.tier.read_run(keys, MIB, lambda views: [bytes(view) for view in views])
        for key, got in zip(keys, found[1] if found else [], strict=False):
            assert got == value(key)
            assert self.clock.monotonic_s() < self.used[key] + TTL_S
            self.used[key] = self.clock.monotonic_s()

    @rule(hours=st.floats(0.01, 30))
    def wait(self, hours: float) -> None:
        self.clock.advance(hours * HOUR_S)
        self.tier.maintenance.tick()

    @rule(hours=st.sampled_from([-100, -24, 24, 100]))
    def step_the_wall_clock(self, hours: float) -> None:
        self.clock.step_wall(hours * HOUR_S)

    @rule(down_h=st.floats(0, 20), step_h=st.sampled_from([0, 0, -48]))
    def reboot(self, down_h: float, step_h: float) -> None:
        """The machine restarts; with the wall clock off, the outage is not counted, so pages live longer."""
        self.tier.close()
        before_s = self.clock.monotonic_s()
        self.clock.reboot(f"boot-{before_s}", down_s=down_h * HOUR_S)
        self.clock.step_wall(step_h * HOUR_S)
        counted_s = down_h * HOUR_S if step_h == 0 else 0.0
        shift_s = self.clock.monotonic_s() - before_s - counted_s
        self.used = {key: used_s + shift_s for key, used_s in self.used.items()}
        self.tier = self.open()
        self.slack_s = self.tier.config.usage_grain_s

    @rule()
    def restart(self) -> None:
        """Uses closer together than a grain may count as one after it."""
        self.tier.close()
        self.tier = self.open()
        self.slack_s = self.tier.config.usage_grain_s

    @rule(tail=st.binary(max_size=300), lost_index=st.booleans())
    def crash(self, tail: bytes, lost_index: bool) -> None:
        """kill -9 while something was being appended; sometimes the indices are lost as well."""
        copy = self.directory.with_name(self.directory.name + "-copy")
        shutil.copytree(self.directory, copy)
        self.tier.close()
        shutil.rmtree(self.directory)
        copy.rename(self.directory)
        files = sorted(self.directory.glob("segments/*/values.dat"))
        if files:
            with files[-1].open("ab") as file:
                file.write(tail)
        if lost_index:
            for path in self.directory.glob("segments/*/data.mdb"):
                path.unlink()
        self.tier = self.open()
        self.slack_s = max(self.slack_s, self.tier.config.usage_grain_s)

    @precondition(lambda self: len(self.used) > 0)
    @rule(which=st.integers(0, 10**6), bit=st.integers(0, 10**6))
    def flip_a_bit(self, which: int, bit: int) -> None:
        key = list(self.used)[which % len(self.used)]
        entry = self.tier._index.get(key)
        if entry is None or not entry.offset:
            return
        self.damaged.add(key)
        path = entry.segment.path / "values.dat"
        at = entry.offset + bit % (entry.size * 8) // 8
        fd = os.open(path, os.O_RDWR)
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), at)
        os.close(fd)

    @invariant()
    def books_balance(self) -> None:
        self.tier.check_integrity()


TierMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTierMachine = TierMachine.TestCase
