"""Time as an argument: the wall clock, which people may step, and a clock that only runs on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """Where the store reads time; tests pass a ``ManualClock``."""

    def wall_s(self) -> float:
        """Seconds since the epoch; may jump either way."""

    def monotonic_s(self) -> float:
        """Seconds since an unspecified start; never steps, counts on while the machine sleeps."""

    def boot_id(self) -> str:
        """Names the period in which ``monotonic_s`` readings of processes compare; "" if unknown."""


class SystemClock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self._boottime = getattr(time, "CLOCK_BOOTTIME", None)
        path = Path("/proc/sys/kernel/random/boot_id")
        try:
            self._boot_id = path.read_text().strip() if self._boottime is not None else ""
        except OSError:
            self._boot_id = ""

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since boot where the platform has such a clock, else ``time.monotonic``."""
        return time.monotonic() if self._boottime is None else time.clock_gettime(self._boottime)

    def boot_id(self) -> str:
        """The kernel's boot id."""
        return self._boot_id


class ManualClock:
    """A clock that moves when told: for tests and simulation."""

    def __init__(
        self, *, wall_s: float = 1_800_000_000.0, monotonic_s: float = 1000.0, boot_id: str = "boot-0"
    ) -> None:
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._boot_id = boot_id

    def wall_s(self) -> float:
        """The wall time last set."""
        return self._wall_s

    def monotonic_s(self) -> float:
        """The running time last set."""
        return self._monotonic_s

    def boot_id(self) -> str:
        """The boot id last set."""
        return self._boot_id

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._wall_s += seconds
        self._monotonic_s += seconds

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock alone, as an operator or NTP does."""
        self._wall_s += seconds

    def reboot(self, boot_id: str, *, down_s: float = 0.0) -> None:
        """The machine restarts: the running clock starts over under another boot id."""
        self._wall_s += down_s
        self._monotonic_s = 10.0
        self._boot_id = boot_id
