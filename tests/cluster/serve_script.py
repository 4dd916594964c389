"""``serve_script.py NAME CONFIG [OVERRIDE ...]``: a cluster in the foreground, a JSON line for each event."""

import ctypes
import json
import signal
import sys
from dataclasses import asdict

from cedar.cluster.config_load import load_config
from cedar.cluster.errors import LaunchError
from cedar.cluster.launch import RunningCluster, serve_forever
from cedar.cluster.progress import Step


def say(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


def on_progress(step: Step) -> None:
    say(asdict(step))


def on_ready(cluster: RunningCluster) -> None:
    say({"ready": cluster.address})


def end_with_parent() -> None:
    """A test run that is killed takes its cluster with it (Linux: PR_SET_PDEATHSIG is 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    name, source, *overrides = sys.argv[1:]
    try:
        sys.exit(
            serve_forever(
                load_config(source, overrides), name=name, on_progress=on_progress, on_ready=on_ready
            )
        )
    except LaunchError as error:
        say({"failed": error.step, "detail": str(error)})
        sys.exit(1)
