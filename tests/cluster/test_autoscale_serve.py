"""A load signal moves a deployment of a real Serve up and back down; no request ever passes a handle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_load_signal_scales_a_stage_up_and_down(tmp_path: Path) -> None:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "planner_script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["decode"] == 1, "the other stage keeps its size"
    assert told["up_s"] < 60
    assert told["down_s"] < 60
