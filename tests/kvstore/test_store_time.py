from __future__ import annotations

from pathlib import Path

import pytest
from cedar.kvstore.clock import ManualClock, SystemClock
from cedar.kvstore.store_time import StoreTime, load_mark

DAY = 86_400.0


def start(path: Path, clock: ManualClock, floor_s: float = 0.0) -> StoreTime:
    return StoreTime(clock, path, floor_s=floor_s, max_gap_s=DAY)


@pytest.mark.parametrize("step", [DAY, -DAY, 80 * 3600, -80 * 3600])
def test_a_step_of_the_wall_clock_moves_nothing(tmp_path: Path, clock: ManualClock, step: float):
    time = start(tmp_path / "t", clock)
    begin = time.now_s()
    clock.step_wall(step)
    assert time.now_s() == begin
    clock.advance(5)
    assert time.now_s() == begin + 5


@pytest.mark.parametrize("step", [0, DAY, -DAY, 30 * DAY])
def test_a_restart_in_one_boot_follows_the_running_clock(tmp_path: Path, clock: ManualClock, step: float):
    time = start(tmp_path / "t", clock)
    time.save()
    begin = time.now_s()
    clock.advance(100)
    clock.step_wall(step)
    assert start(tmp_path / "t", clock).now_s() == pytest.approx(begin + 100)


@pytest.mark.parametrize(
    ("down", "step", "counted"), [(3600, 0, 3600), (3600, -DAY, 0), (60, 30 * DAY, DAY), (9 * DAY, 0, DAY)]
)
def test_a_reboot_believes_the_wall_clock_within_limits(
    tmp_path: Path, clock: ManualClock, down: float, step: float, counted: float
):
    time = start(tmp_path / "t", clock)
    time.save()
    begin = time.now_s()
    clock.reboot("boot-1", down_s=down)
    clock.step_wall(step)
    assert start(tmp_path / "t", clock).now_s() == pytest.approx(begin + counted)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"store_s": "x"}', b"\xff\xfe", None])
def test_a_lost_mark_starts_from_the_data(tmp_path: Path, clock: ManualClock, content: bytes | None):
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    assert load_mark(path) is None
    wall = clock.wall_s()
    assert start(path, clock).now_s() == wall
    assert start(path, clock, floor_s=wall + 50).now_s() == wall + 50  # the wall clock is behind the data
    assert start(path, clock, floor_s=wall - 50).now_s() == wall
    assert start(path, clock, floor_s=wall - 30 * DAY).now_s() == wall - 29 * DAY


def test_time_is_never_behind_the_data(tmp_path: Path, clock: ManualClock):
    time = start(tmp_path / "t", clock)
    time.save()
    assert start(tmp_path / "t", clock, floor_s=time.now_s() + 9).now_s() == time.now_s() + 9


def test_the_machine_has_a_clock():
    clock = SystemClock()
    assert clock.wall_s() > 1_600_000_000
    assert clock.monotonic_s() <= clock.monotonic_s()
    assert clock.boot_id() == SystemClock().boot_id()
