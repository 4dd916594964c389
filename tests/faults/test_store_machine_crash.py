"""The machine goes down: the disk holds some pages of the file as they were and some as they became.

With syncs, what a crash can leave is: any part of a commit's pages but not its meta page, or all of them and
that page, old or new. Whatever was acknowledged must be whole. Without syncs it is any mix at all; then
nothing that is wrong may leave the store, and the mark of the earlier boot discards it altogether.
The scans run in processes of their own, since a mixed-up tree may be a signal.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import store_child
from .store_child import count, items_of, open_tier

PAGE = 4096
META_PAGES = 2
PAGES = 8
COMMITS = 12


def written(directory: Path, durability: str) -> list[bytes]:
    """The database after each commit; number n holds the chains 0 to n."""
    tier = open_tier(directory, durability=durability, segment_bytes=4 << 20)
    states = []
    for salt in range(COMMITS):
        assert tier.put(items_of(salt, PAGES)).result(30).stored == PAGES
        states.append(data_file(directory).read_bytes())
    tier.close()
    return states


def data_file(directory: Path) -> Path:
    return directory / "segments" / "00000001" / "data.mdb"


def mixed(before: bytes, after: bytes, old_share: float, *, metas: str, rng: random.Random) -> bytes:
    """Some pages as in ``before``, the others as in ``after``; ``metas``: "old", "new" or "any"."""
    result = bytearray(after)
    for start in range(0, len(after), PAGE):
        is_meta = start < META_PAGES * PAGE
        old = rng.random() < old_share
        if is_meta and metas != "any":
            old = metas == "old"
        if old:
            page = before[start : start + PAGE]
            result[start : start + PAGE] = page + bytes(min(PAGE, len(after) - start) - len(page))
    return bytes(result)


def open_mixed(directory: Path, content: bytes) -> None:
    data_file(directory).write_bytes(content)
    (directory / "time.json").unlink(missing_ok=True)


def test_with_syncs_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    rng = random.Random(5)
    states = written(tmp_path / "store", "batch")
    for commit in range(1, COMMITS):
        for old_share in (0.005, 0.02, 0.3, 0.5, 0.9):
            before, after = states[commit - 1], states[commit]
            cut_off = mixed(before, after, old_share, metas="old", rng=rng)
            finished = mixed(before, after, 0.0, metas=rng.choice(("old", "new")), rng=rng)
            for content in (cut_off, finished):
                open_mixed(tmp_path / "store", content)
                tier = open_tier(tmp_path / "store", segment_bytes=4 << 20)
                for salt in range(commit):
                    assert count(tier, salt, PAGES) == [PAGES, 0, 0], (commit, old_share, salt)
                assert count(tier, commit, PAGES) in ([PAGES, 0, 0], [0, PAGES, 0]), "all of it or nothing"
                assert tier.put(items_of(99, 1)).result(30).stored == 1
                assert tier.counters["store_segments_damaged"] == 0
                tier.close()


SCAN = """
import json, logging, sys
from pathlib import Path
sys.path[:0] = [{here!r}]
from store_child import count, open_tier
logging.disable(logging.CRITICAL)
directory, first = Path(sys.argv[1]), int(sys.argv[2])
data = directory / "segments" / "00000001" / "data.mdb"
mixes = sorted(Path(sys.argv[3]).iterdir())
for number in range(first, len(mixes)):
    for path in (directory / "damaged").glob("*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    for path in (directory / "segments").glob("*/*"):
        path.unlink()
    data.parent.mkdir(exist_ok=True)
    data.write_bytes(mixes[number].read_bytes())
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
        content = mixed(states[early], states[late], old_share, metas="any", rng=rng)
        (mixes / f"{number:03d}").write_bytes(content)
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
    crashed = data_file(tmp_path / "store").read_bytes()
    mark = (tmp_path / "store" / "volatile").read_text()
    tier.close()
    data_file(tmp_path / "store").write_bytes(crashed)
    (tmp_path / "store" / "volatile").write_text(mark)
    tier = open_tier(tmp_path / "store", durability="none")
    assert count(tier, 0, PAGES) == [PAGES, 0, 0], "the process died, the machine did not"
    tier.close()
    (tmp_path / "store" / "volatile").write_text("another boot")
    tier = open_tier(tmp_path / "store")
    assert count(tier, 0, PAGES) == [0, PAGES, 0]
    tier.close()
