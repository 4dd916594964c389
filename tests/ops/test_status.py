"""The view of a cluster, from answers as workers give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cedar.cluster import remote, state_file
from cedar.cluster.remote import ClusterStatus, WorkerReport
from cedar.cluster.state_file import ClusterState, WorkerEntry
from cedar.ops import cli
from cedar.v1 import generation_pb2, stages_pb2


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterStatus:
    """A state file, and answers of which one is missing."""
    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path))
    stages = ("gateway", "encoder", "prefill", "decode", "store", "store")
    entries = tuple(WorkerEntry(stage, f"127.0.0.1:{n}", 100 + n, n) for n, stage in enumerate(stages))
    state = ClusterState("default", "127.0.0.1:50051", 1, 0, 0.0, "", "", entries)
    state_file.write(state)
    busy = stages_pb2.WorkerStatus(
        active=2, queued=1, pages_total=128, pages_leased=5, pages_cached=9, slots_total=4, slots_leased=2
    )
    busy.counters["prompts"] = 7
    drafting = stages_pb2.WorkerStatus(draining=True, slots_total=8)
    drafting.counters["draft_proposed"] = 40
    drafting.counters["draft_accepted"] = 23
    reports = (
        WorkerReport(entries[0], stages_pb2.WorkerStatus(active=2)),
        WorkerReport(entries[1], error="unavailable"),
        WorkerReport(entries[2], busy),
        WorkerReport(entries[3], drafting),
        WorkerReport(
            entries[4], store={"store_pages": 12.0, "store_disk_bytes": 40960.0, "store_puts_refused": 0.0}
        ),
        WorkerReport(entries[5], store={"store_pages": 13.0}),
    )
    model = generation_pb2.GetModelResponse(name="tiny", bytes_per_token=106, page_tokens=32, page_bytes=3392)
    found = ClusterStatus(state, model, reports)
    monkeypatch.setattr(remote, "status", lambda state, timeout_s=2.0: found)
    return found


def test_table(cluster: ClusterStatus, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 1
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "unavailable" in rows["encoder"]
    assert "5+9/128" in rows["prefill"]
    assert "2/4" in rows["prefill"]
    assert "draining" in rows["decode"]
    assert "23/40" in rows["decode"]
    assert "40.0 KiB" in rows["store_disk_bytes"]
    assert "store_puts_refused" not in rows, "what never happened takes no line"
    assert rows["store_pages"].split()[-2:] == ["12", "13"], "every node has its column"
    assert "106 bytes a token" in out


def test_json(cluster: ClusterStatus, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [worker["store"]["store_pages"] for worker in record["workers"] if worker["store"]] == [12, 13]
    workers = {worker["stage"]: worker for worker in reversed(record["workers"])}
    assert workers["prefill"]["status"]["counters"] == {"prompts": 7}
    assert workers["prefill"]["status"]["slots_leased"] == 2
    assert workers["store"]["store"]["store_pages"] == 12
    assert workers["encoder"]["status"] is None
    assert record["model"]["page_tokens"] == 32


def test_stop_of_everything_when_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path))
    assert cli.main(["stop", "--all"]) == 0
    assert "no cluster runs here" in capsys.readouterr().out
    assert cli.main(["stop"]) == 3
