"""Starts that are hard: a read-only disk, no descriptors, no memory, damaged files. No page is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore import ssd_tier
from cedar.kvstore.segment import Segment
from cedar.kvstore.usage_log import UsageLog

from .conftest import TierStarter
from .store_child import count, items_of, keys_of, open_tier
from .store_shim import SYNC, FailingDisk

CHAINS = 8


def filled(directory: Path) -> None:
    """Several segments."""
    tier = open_tier(directory)
    for salt in range(CHAINS):
        assert tier.put(items_of(salt, 20)).result(30).stored == 20
    assert tier.stats()["store_segments"] > 1
    tier.close()


def expect_whole(directory: Path) -> None:
    tier = open_tier(directory)
    for salt in range(CHAINS):
        assert count(tier, salt, 20) == [20, 0, 0]
    assert tier.counters["store_segments_damaged"] == 0
    tier.check_integrity(deep=True)
    tier.close()


ON_A_READ_ONLY_DISK = """
import asyncio, json, logging, subprocess, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from store_child import keys_of, value_of
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig
from cedar.kvstore.node import StoreNode

disk, durability = Path(sys.argv[2]), sys.argv[3]

async def main():
    config = SsdConfig(
        directory=disk / "store", capacity_bytes=64 * MIB, reserve_bytes=MIB, segment_bytes=MIB,
        maintenance_s=0.05, disk_retry_s=0.05, durability=durability,
    )
    node = StoreNode(NodeConfig(ssd=config))
    client = StoreClient(await node.start(), config=ClientConfig(match_timeout_s=5, stall_timeout_s=5))

    async def get(salt):
        keys = keys_of(salt, 20)
        found = [(i, bytes(value)) async for i, value in client.get_pages(keys)]
        assert found == [(i, value_of(keys[i])) for i in range(len(found))]
        return len(found)

    async def put(salt):
        keys = keys_of(salt, 20)
        return await client.put_pages(keys, [value_of(key) for key in keys], tenant=b"tenant")

    gets = [await get(salt) for salt in range(8)]
    before = await put(50)
    await asyncio.sleep(0.3)
    failures = node.counters["store_maintenance_failures"]
    subprocess.run(["mount", "-o", "remount,rw,bind", str(disk)], check=True)
    await asyncio.sleep(0.1)
    after = await put(50)
    again = [await get(salt) for salt in (*range(8), 50)]
    node.ssd.check_integrity(deep=True)
    await client.close()
    await node.stop(0.2)
    print(json.dumps(dict(gets=gets, before=vars(before), after=vars(after), again=again, failures=failures)))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("with_data", "durability"), [(False, "batch"), (True, "none")], ids=["first start", "with data"]
)
def test_a_read_only_disk(with_data: bool, durability: str, tmp_path: Path) -> None:
    """The node starts, gives what is there, refuses puts, and takes them once the disk does."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if with_data:
        filled(disk / "store")
    mount = f"mount --bind {disk} {disk} && mount -o remount,ro,bind {disk}"
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here: a read-only disk cannot be made")
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"a read-only disk cannot be made here: {probe.stderr.strip()}")
    inside = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    here = str(Path(__file__).parent)
    ended = subprocess.run(
        [*inside, sys.executable, "-c", ON_A_READ_ONLY_DISK, here, str(disk), durability],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(part for part in sys.path if part)},
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    there = [20 if with_data else 0] * 8
    assert result["gets"] == there
    assert (result["before"]["stored"], result["before"]["refused"]) == (0, 20)
    assert result["failures"] == 0, "maintenance does not mind"
    assert result["after"]["stored"] == 20, "it heals by itself"
    assert result["again"] == [*there, 20]
    tier = open_tier(disk / "store")
    assert [count(tier, salt, 20)[0] for salt in (*range(8), 50)] == [*there, 20]
    tier.close()


def open_files(directory: Path) -> list[str]:
    """What this process has open below a directory, deleted files too."""
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if link.is_symlink()]
    return [name for name in names if name.startswith(str(directory))]


def start_with_limit(directory: Path, limit: str, amount: int) -> bool:
    """Whether a tier started under a resource limit; then it served every page."""
    command = [sys.executable, "-c", LIMITED, str(Path(__file__).parent), str(directory), limit, str(amount)]
    environment = {**os.environ, "PYTHONPATH": ":".join(part for part in sys.path if part)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.stdout in ("whole\n", "refused\n"), (amount, ended.stdout, ended.stderr[-1500:])
    expect_whole(directory)
    return ended.stdout == "whole\n"


def test_too_few_descriptors(tmp_path: Path) -> None:
    """A limit that is reached while segments are opened must not send good segments to salvage."""
    filled(tmp_path / "store")
    started = [start_with_limit(tmp_path / "store", "NOFILE", limit) for limit in range(3, 21, 2)]
    assert not all(started)


def test_too_little_memory(tmp_path: Path) -> None:
    """MiB beyond what the process has before it opens the store."""
    filled(tmp_path / "store")
    started = [start_with_limit(tmp_path / "store", "AS", amount) for amount in (10, 25, 40, 60, 120)]
    assert not all(started)


LIMITED = """
import os, resource, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from store_child import count, open_tier
limit, amount = sys.argv[3], int(sys.argv[4])
if limit == "AS":
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    amount = taken + (amount << 20)
resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (amount, amount))
try:
    tier = open_tier(Path(sys.argv[2]))
except (OSError, RuntimeError, MemoryError) as error:
    print("refused", flush=True)
    os._exit(0)
found = [count(tier, salt, 20) for salt in range(8)]
print("whole" if found == [[20, 0, 0]] * 8 else found, flush=True)
tier.close()
"""


def test_a_start_that_fails_can_be_repeated_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that was open by then is closed again: LMDB refuses to open a database twice."""
    filled(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(ssd_tier, "Quarantine", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        for _ in range(3):
            with pytest.raises(OSError, match="no room"):
                open_tier(tmp_path / "store")
    assert open_files(tmp_path) == []
    expect_whole(tmp_path / "store")


def test_damaged_segments_leave_no_descriptors_behind(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    for name in ("values.dat", "data.mdb"):
        for path in (tmp_path / "store" / "segments").glob(f"*/{name}"):
            os.truncate(path, path.stat().st_size // 2)
        tier = open_tier(tmp_path / "store")
        assert tier.counters["store_segments_damaged"] > 1
        tier.close()
    assert open_files(tmp_path) == []


def test_a_segment_that_cannot_be_opened_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails just now is no reason to delete what it holds."""
    filled(tmp_path / "store")
    first = tmp_path / "store" / "segments" / "00000001" / "values.dat"
    load = Segment.load

    def fail(path: Path, *arguments: Any, **named: Any) -> Any:
        if path == first.parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return load(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "load", fail)
        tier = open_tier(tmp_path / "store")
        assert tier.counters["store_segments_damaged"] == 1
        assert sum(count(tier, salt, 20)[0] for salt in range(CHAINS)) < CHAINS * 20
        assert tier.stats()["store_disk_bytes"] > first.stat().st_size, "its room is counted"
        tier.maintenance.tick()
        tier.close()
    expect_whole(tmp_path / "store")


def test_uses_noted_after_a_torn_end_are_found(tmp_path: Path) -> None:
    """kill -9 in the middle of an append must not hide the appends that follow in the same file."""
    first, second = keys_of(0, 2)
    log = UsageLog(tmp_path / "uses", period_s=3600.0, keep_s=1e6)
    log.append({first: 1.0}, 10.0)
    (path,) = (tmp_path / "uses").iterdir()
    with open(path, "ab") as file:
        file.write(b"\1\0\0\0" + b"torn")
    assert dict(log.read()) == {first: 1.0}
    log.append({second: 2.0}, 11.0)
    assert dict(log.read()) == {first: 1.0, second: 2.0}


def test_unsynced_data_of_an_earlier_process_is_synced_before_the_mark_goes(
    start_tier: TierStarter, disk: FailingDisk, tmp_path: Path
) -> None:
    tier = start_tier(durability="none")
    assert tier("put", 0, 4)["stored"] == 4
    tier.kill()
    tier = start_tier(disk=disk)  # with durability "batch" from now on
    assert (tmp_path / "store" / "volatile").exists()
    disk.fail(SYNC, errno.EIO)
    tier("close")
    assert disk.orders.hits, "it tried"
    assert (tmp_path / "store" / "volatile").exists(), "and did not claim what it could not do"
    disk.heal()
    tier = start_tier(disk=disk)
    disk.fail(SYNC, errno.EIO)
    assert tier("put", 1, 4)["refused"] == 4, "it could be lost with the rest"
    assert (tmp_path / "store" / "volatile").exists()
    disk.heal()
    time.sleep(0.06)
    assert tier("put", 1, 4)["stored"] == 4
    assert not (tmp_path / "store" / "volatile").exists(), "it is as durable as it was acknowledged"
    tier.kill()
    tier = start_tier()
    assert tier("get", 0, 4) == tier("get", 1, 4) == [4, 0, 0]
