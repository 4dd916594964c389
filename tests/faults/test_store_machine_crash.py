"""The machine goes down: the disk holds some blocks of the files as they were and some as they became.

With syncs, what was acknowledged is in the values file, whole; beyond it lies any part of the commit that was
under way. The index is as old as it may be, or in the middle of a commit of its own: any part of its pages,
but not yet its meta page. Without syncs both are any mix at all; then nothing that is wrong may leave the
store, and the mark of the earlier boot discards it altogether.
The scans run in processes of their own, since a mixed-up tree may be a signal.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from . import store_child
from .store_child import count, items_of, open_tier

PAGE = 4096
META_PAGES = 2
PAGES = 8
COMMITS = 12


class Disk(NamedTuple):
    """What both files of the only segment hold; no index is no bytes."""

    values: bytes
    index: bytes


def written(directory: Path, durability: str) -> list[Disk]:
    """The files after each commit; number n holds the chains 0 to n. Every third has its index up to date."""
    tier = open_tier(directory, durability=durability, segment_bytes=4 << 20)
    states = []
    for salt in range(COMMITS):
        assert tier.put(items_of(salt, PAGES)).result(30).stored == PAGES
        if salt % 3 == 2:
            tier._writer.call(lambda: tier._committer.keep_index(everything=True)).result(30)
        states.append(read_files(directory))
    tier.close()
    return states


def read_files(directory: Path) -> Disk:
    segment = directory / "segments" / "00000001"
    index = segment / "data.mdb"
    return Disk((segment / "values.dat").read_bytes(), index.read_bytes() if index.exists() else b"")


def lay_out(directory: Path, disk: Disk) -> None:
    """Make the directory what a start after the crash finds."""
    segment = directory / "segments" / "00000001"
    (segment / "values.dat").write_bytes(disk.values)
    (segment / "lock.mdb").unlink(missing_ok=True)
    if disk.index:
        (segment / "data.mdb").write_bytes(disk.index)
    else:
        (segment / "data.mdb").unlink(missing_ok=True)
    (directory / "time.json").unlink(missing_ok=True)


def mixed(before: bytes, after: bytes, old_share: float, rng: random.Random, *, metas: str = "any") -> bytes:
    """Some blocks as in ``before``, the others as in ``after``; ``metas`` of an index: "old" or "any"."""
    result = bytearray(after)
    for start in range(0, len(after), PAGE):
        old = rng.random() < old_share
        if start < META_PAGES * PAGE and metas != "any":
            old = metas == "old"
        if old:
            page = before[start : start + PAGE]
            result[start : start + PAGE] = page + bytes(min(PAGE, len(after) - start) - len(page))
    return bytes(result)


def crashes(states: list[Disk], commit: int, old_share: float, rng: random.Random) -> list[tuple[Disk, int]]:
    """What a crash around a commit can leave, each with the number of chains that it must have kept."""
    before, after = states[commit - 1], states[commit]
    torn = mixed(before.values, after.values, old_share, rng)
    cut = before.values + after.values[len(before.values) : len(before.values) + rng.randrange(50_000)]
    older = states[rng.randrange(commit)].index
    ends = [
        (Disk(torn, before.index), commit),
        (Disk(cut, before.index), commit),
        (Disk(torn, older), commit),
        (Disk(after.values, older), commit + 1),
        (Disk(after.values, after.index), commit + 1),
    ]
    if commit + 1 < len(states):  # the next one, written while this one was synced
        both = mixed(before.values, states[commit + 1].values, old_share, rng)
        ends.append((Disk(both, before.index), commit))
    if after.index != before.index and before.index:
        half = mixed(before.index, after.index, old_share, rng, metas="old")
        ends.append((Disk(after.values, half), commit + 1))
    elif after.index != before.index:
        ends.append((Disk(after.values, mixed(b"", after.index, old_share, rng)), commit + 1))
    return ends


def test_with_syncs_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    rng = random.Random(int(os.environ.get("CEDAR_CRASH_SEED", "1")))  # other histories by hand
    directory = tmp_path / "store"
    states = written(directory, "batch")
    for commit in range(1, COMMITS):
        for disk, kept in crashes(states, commit, rng.choice((0.005, 0.1, 0.5, 0.9)), rng):
            lay_out(directory, disk)
            tier = open_tier(directory, segment_bytes=4 << 20)
            for salt in range(kept):
                assert count(tier, salt, PAGES) == [PAGES, 0, 0], (commit, salt)
            for salt in (kept, kept + 1):
                assert count(tier, salt, PAGES)[2] == 0, "of what was under way, each page is whole or gone"
            assert tier.counters["store_values_corrupt"] == 0, "it is not there, rather than damaged"
            assert tier.put(items_of(99, 1)).result(30).stored == 1
            tier.close()
            tier = open_tier(directory, segment_bytes=4 << 20)
            assert count(tier, 99, 1) == [1, 0, 0]
            assert all(count(tier, salt, PAGES) == [PAGES, 0, 0] for salt in range(kept))
            tier.close()
            for path in directory.glob("segments/0000000[2-9]/*"):
                path.unlink()
            for path in directory.glob("segments/0000000[2-9]"):
                path.rmdir()


SCAN = """
import json, logging, sys
from pathlib import Path
sys.path[:0] = [{here!r}]
from store_child import count, open_tier
logging.disable(logging.CRITICAL)
directory, first = Path(sys.argv[1]), int(sys.argv[2])
segment = directory / "segments" / "00000001"
mixes = sorted(Path(sys.argv[3]).iterdir())
for number in range(first, len(mixes)):
    for path in (directory / "segments").glob("*/*"):
        path.unlink()
    segment.mkdir(exist_ok=True)
    for name in ("values.dat", "data.mdb"):
        (segment / name).write_bytes((mixes[number] / name).read_bytes())
    print(json.dumps(["start", number]), flush=True)
    tier = open_tier(directory, segment_bytes=4 << 20)
    found = [count(tier, salt, {pages}) for salt in range({commits})]
    tier.maintenance.tick()
    found += [count(tier, salt, {pages}) for salt in range({commits})]
    tier.close()
    wrong, right = sum(f[2] for f in found), sum(f[0] for f in found[{commits}:])
    print(json.dumps(["done", number, wrong, right]), flush=True)
"""


@pytest.mark.parametrize("old_share", [0.005, 0.02, 0.3])
def test_without_syncs_nothing_wrong_is_served(old_share: float, tmp_path: Path) -> None:
    rng = random.Random(old_share)
    states = written(tmp_path / "store", "none")
    mixes = tmp_path / "mixes"
    mixes.mkdir()
    total = 26
    for number in range(total):
        early, late = sorted(rng.sample(range(COMMITS), 2))
        mix = mixes / f"{number:03d}"
        mix.mkdir()
        for name, old, new in zip(("values.dat", "data.mdb"), states[early], states[late], strict=True):
            (mix / name).write_bytes(mixed(old, new, old_share, rng))
    script = SCAN.format(here=str(Path(store_child.__file__).parent), pages=PAGES, commits=COMMITS)
    next_mix, signals, right = 0, 0, 0
    while next_mix < total:
        child = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "store"), str(next_mix), str(mixes)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": ":".join(part for part in sys.path if part)},
        )
        lines: list[Any] = [json.loads(line) for line in child.stdout.splitlines()]
        done = [line for line in lines if line[0] == "done"]
        assert all(wrong == 0 for _, _, wrong, _ in done)
        right += sum(found for _, _, _, found in done)
        next_mix += len(done)
        if next_mix < total:
            assert child.returncode < 0, child.stderr[-2000:]
            signals += 1
            next_mix += 1
    assert right > 0
    assert signals <= total // 4


def test_without_syncs_another_boot_starts_empty(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store", durability="none")
    assert tier.put(items_of(0, PAGES)).result(30).stored == PAGES
    crashed = read_files(tmp_path / "store")
    mark = (tmp_path / "store" / "volatile").read_text()
    tier.close()
    lay_out(tmp_path / "store", crashed)
    (tmp_path / "store" / "volatile").write_text(mark)
    tier = open_tier(tmp_path / "store", durability="none")
    assert count(tier, 0, PAGES) == [PAGES, 0, 0], "the process died, the machine did not"
    tier.close()
    (tmp_path / "store" / "volatile").write_text("another boot")
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, PAGES) == [0, PAGES, 0]
    tier.close()
