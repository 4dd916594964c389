from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, logging, sys, time
from pathlib import Path
logging.disable(logging.CRITICAL)
sys.path[:0] = [{tests!r}]
from conftest import Chains
from cedar.kvstore import segment_set
from cedar.kvstore.config import MIB, SsdConfig
from cedar.kvstore.machine import free_disk_bytes
from cedar.kvstore.ssd_tier import SsdTier

disk, blind = Path({disk!r}), sys.argv[1] == "blind"
if blind:  # the check of free space sees nothing, so LMDB itself meets the end of the disk
    segment_set.free_disk_bytes = lambda path: 1 << 40
chains = Chains()
config = SsdConfig(directory=disk / "store", capacity_bytes=1 << 30, segment_bytes=2 * MIB, reserve_bytes=0,
                   disk_retry_s=0.01, commit_wait_s=0.0)
tier = SsdTier(config, background=False)
acked, reasons, salt = [], [], 0
filler = disk / "filler"
filler.write_bytes(bytes(4 * MIB))
while len(reasons) < 20:
    keys = chains.keys(10, salt=salt)
    salt += 1
    counts = tier.put(chains.items(keys)).result(30)
    if counts.refused:
        reasons.append(counts.reason)
        time.sleep(0.012)
    else:
        acked.append(keys)
tier.close()
with open(disk / "brim", "wb", buffering=0) as brim:  # not one page left
    try:
        while brim.write(bytes(4096)):
            pass
    except OSError:
        pass
tier = SsdTier(config, background=False)  # a node must start on a full disk
tier.maintenance.save()
good = sum(tier.get(key) == chains.value(key) for keys in acked for key in keys)
full_put = tier.put(chains.items(chains.keys(10, salt=40_000))).result(30).refused
filler.unlink()
(disk / "brim").unlink()
time.sleep(0.02)
healed = tier.put(chains.items(chains.keys(10, salt=50_000))).result(30).stored
segment_set.free_disk_bytes = free_disk_bytes
while not tier.put(chains.items(chains.keys(10, salt=salt))).result(30).refused:
    salt += 1
    time.sleep(0.001)
tier.maintenance.tick()
time.sleep(0.02)
after_eviction = tier.put(chains.items(chains.keys(10, salt=60_000))).result(30).stored
tier.check_integrity(deep=True)
tier.close()
again = SsdTier(config, background=False)
kept = again.match(chains.keys(10, salt=60_000))
again.check_integrity(deep=True)
again.close()
print(json.dumps(dict(acked=len(acked), good=good, reasons=sorted(set(reasons)), healed=healed,
                      full_put=full_put, after_eviction=after_eviction, kept=kept)))
"""


@pytest.mark.parametrize("mode", ["sees the disk", "blind"])
def test_a_full_disk_refuses_puts_keeps_gets_and_heals(mode: str, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = f"mount -t tmpfs -o size=16m tmpfs {disk}"
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here: a full disk cannot be made")
    probe = subprocess.run(["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {probe.stderr.strip()}")
    script = SCRIPT.format(tests=str(Path(__file__).parent), disk=str(disk))
    child = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{inside} && exec "$@"', "sh", sys.executable, "-c", script, mode],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout)
    assert result["acked"] > 100
    assert result["good"] == 10 * result["acked"]
    assert result["reasons"] == (["disk"] if mode == "blind" else ["full"])
    assert result["full_put"] == 10
    assert (result["healed"], result["after_eviction"], result["kept"]) == (10, 10, 10)
