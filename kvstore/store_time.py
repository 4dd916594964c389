"""Store time: the time that ages are counted in. It never runs backwards and no step of a clock moves it.

Within a process it follows the running clock. Over a restart within one boot it follows that same clock;
over a reboot it takes what the wall clock says has passed, but never less than nothing nor more than
``max_gap_s``. So a wall clock that is a day off, either way, neither expires everything nor keeps it for
ever; the price is that pages may outlive a very long outage by the part that was not counted.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash
from cedar.kvstore.clock import Clock


@dataclass(frozen=True)
class TimeMark:
    """One reading of store time beside the clocks it was read from."""

    store_s: float
    wall_s: float
    monotonic_s: float
    boot_id: str


def resumed_time(mark: TimeMark | None, clock: Clock, *, floor_s: float, max_gap_s: float) -> float:
    """Store time at a start.

    ``mark``: the last one saved, None at a first start or when it was lost. ``floor_s``: the latest store
    time found in the data, 0 if there is none; the result is never below it.
    """
    if mark is None:
        gap = min(max(clock.wall_s() - floor_s, 0.0), max_gap_s)
        return floor_s + gap if floor_s > 0 else clock.wall_s()
    same_boot = bool(mark.boot_id) and mark.boot_id == clock.boot_id()
    if same_boot and clock.monotonic_s() >= mark.monotonic_s:
        gap = clock.monotonic_s() - mark.monotonic_s
    else:
        gap = min(max(clock.wall_s() - mark.wall_s, 0.0), max_gap_s)
    return max(mark.store_s + gap, floor_s)


class StoreTime:
    """Store time of a running tier, saved in ``path`` now and then."""

    def __init__(self, clock: Clock, path: Path, *, floor_s: float, max_gap_s: float) -> None:
        self._clock = clock
        self._path = path
        self._start_s = resumed_time(load_mark(path), clock, floor_s=floor_s, max_gap_s=max_gap_s)
        self._start_monotonic_s = clock.monotonic_s()

    def now_s(self) -> float:
        """Store time, in seconds; starts near the epoch's count, then goes its own way."""
        return self._start_s + (self._clock.monotonic_s() - self._start_monotonic_s)

    def save(self) -> None:
        """Write a mark, replacing the last one at once or not at all. OSError when the disk will not."""
        clock = self._clock
        mark = TimeMark(self.now_s(), clock.wall_s(), clock.monotonic_s(), clock.boot_id())
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(mark) | {"checksum": _checksum(mark)}))
        os.replace(scratch, self._path)


def load_mark(path: Path) -> TimeMark | None:
    """The saved mark; None when there is none or it cannot be read.

    A mark with one wrong digit could end the life of every page, so it carries a checksum.
    """
    try:
        fields = json.loads(path.read_text())
        mark = TimeMark(
            float(fields["store_s"]),
            float(fields["wall_s"]),
            float(fields["monotonic_s"]),
            str(fields["boot_id"]),
        )
        return mark if fields["checksum"] == _checksum(mark) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(mark: TimeMark) -> str:
    return xxhash.xxh3_64_hexdigest(repr(mark).encode())
