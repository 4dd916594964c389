"""kill -9 in every phase of a commit, of the index's commit, and of a removal: one forked tier for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import store_child

SCRIPT = """
import json, logging, os, signal, sys, threading
from pathlib import Path
sys.path[:0] = [{here!r}]
logging.disable(logging.CRITICAL)
from cedar.kvstore import segment, segment_index
from cedar.kvstore.index import PageIndex
from cedar.kvstore.segment import Segment
from cedar.kvstore.values_file import ValuesFile
from store_child import count, items_of, keys_of, open_tier

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, at=1):
    method, calls = getattr(owner, name), [0]
    def wrapped(*a, **k):
        calls[0] += 1
        if calls[0] == at:
            die()
        return method(*a, **k)
    setattr(owner, name, wrapped)

def after(owner, name):
    method = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: (method(*a, **k), die()))

def half_written(share):
    write = ValuesFile.write
    def wrapped(self, offset, pieces):
        data = b"".join(pieces)
        write(self, offset, [data[: int(len(data) * share)]])
        die()
    ValuesFile.write = wrapped

syncing, second = threading.Event(), threading.Event()

def second_written_while_first_is_synced():
    write = ValuesFile.write
    def wrapped(self, offset, pieces):
        write(self, offset, pieces)
        if syncing.is_set():
            second.set()
    ValuesFile.write = wrapped
    ValuesFile.sync = lambda self: (syncing.set(), second.wait(30), die())

def put_two(tier, salt):
    tier.put(items_of(salt, 8))
    syncing.wait(30)
    tier.put(items_of(salt + 1, 8)).result(30)

def put(tier, salt):
    tier.put(items_of(salt, 8)).result(30)

def roll(tier, salt):
    tier._writer.call(tier._segments.close_to_writes).result(30)
    put(tier, salt)

def write_indices(tier, salt):
    put(tier, salt)
    tier._writer.call(lambda: tier._committer.keep_index(everything=True)).result(30)

def remove(tier, salt):
    tier.remove(keys_of(0, 8)).result(30)

def drop(tier, salt):
    tier._writer.call(lambda: tier._segments.drop(tier._segments.all()[0])).result(30)

PHASES = {{
    "nothing written": (lambda: before(ValuesFile, "write"), put),
    "a little written": (lambda: half_written(0.05), put),
    "half written": (lambda: half_written(0.5), put),
    "nearly all written": (lambda: half_written(0.99), put),
    "written, not synced": (lambda: before(ValuesFile, "sync"), put),
    "written, and the next too": (second_written_while_first_is_synced, put_two),
    "synced, not visible": (lambda: after(ValuesFile, "sync"), put),
    "half visible": (lambda: before(PageIndex, "insert", at=4), put),
    "segment directory made": (lambda: before(segment, "ValuesFile"), roll),
    "segment file made": (lambda: before(segment, "sync_path"), roll),
    "segment made": (lambda: after(segment, "sync_path"), roll),
    "index not opened": (lambda: before(segment_index, "_opened"), write_indices),
    "index half filled": (lambda: before(segment_index, "pack_row", at=5), write_indices),
    "index written": (lambda: after(segment_index, "write_index"), write_indices),
    "removal: index written": (lambda: before(segment, "erase"), remove),
    "removal: erased": (lambda: after(segment, "erase"), remove),
    "drop: values gone": (lambda: after(os, "unlink"), drop),
}}

def act(directory, phase):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tier = open_tier(directory, segment_bytes=4 << 20)
    put(tier, 0)
    if phase.startswith("drop"):
        tier._writer.call(tier._segments.close_to_writes).result(30)
    put(tier, 1)
    if phase.startswith(("index", "removal")):
        write_indices(tier, 2)
    else:
        put(tier, 2)
    arrange, work = PHASES[phase]
    arrange()
    work(tier, 3)

for number, phase in enumerate(PHASES):
    directory = Path({store!r}) / str(number)
    pid = os.fork()
    if pid == 0:
        try:
            act(directory, phase)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    result = []
    for extra in (50, 51):
        tier = open_tier(directory, segment_bytes=4 << 20)
        result.append([count(tier, salt, 8) for salt in range(4)])
        result[-1].append(tier.put(items_of(extra, 8)).result(30).stored)
        result[-1].append(int(tier.counters["store_values_corrupt"]))
        tier.check_integrity(deep=True)
        tier.close()
    print(json.dumps([phase, status, result]), flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[list[object]]]]:
    store = tmp_path_factory.mktemp("phases")
    script = SCRIPT.format(here=str(Path(store_child.__file__).parent), store=str(store))
    environment = {**os.environ, "PYTHONPATH": ":".join(part for part in sys.path if part)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {phase: (status, result) for phase, status, result in lines}


WHOLE = [8, 0, 0]
GONE = [0, 8, 0]


def test_kill_9_in_every_phase_of_a_commit(results: dict[str, tuple[int, list[list[object]]]]) -> None:
    """Acknowledged chains are whole, the one under way is whole page by page, and the next put works."""
    assert len(results) == 17
    for phase, (status, starts) in results.items():
        assert status == -9, f"{phase}: it was not reached"
        for chains in starts:
            *known, under_way, stored, corrupt = chains
            assert stored == 8, phase
            assert under_way[2] == 0, phase
            if phase.startswith(("removal", "drop")):
                assert known[0] in (WHOLE, GONE), phase
                assert known[1:] == [WHOLE] * 2, phase
            else:
                assert known == [WHOLE] * 3, phase
                assert corrupt == 0, phase
        if phase.startswith(("written", "synced", "half visible", "index")):
            assert starts[0][3] == WHOLE, f"{phase}: what is in the file is found"
        assert starts[1][:4] == starts[0][:4], f"{phase}: the second start finds what the first did"
