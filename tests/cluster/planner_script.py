"""The planner inside a real Serve, over deployments whose load is a file's content. Prints JSON.

``planner_script.py FOLDER``: raises Prefill's load, waits for replicas, lowers it, waits for them to go.
"""

import json
import sys
import time
from pathlib import Path

from cedar.cluster.config_load import parse_config
from cedar.cluster.ray_runtime import RaySession

SCALING = {"min": 1, "max": 3, "target": 2, "up_after_s": 0.5, "down_after_s": 1.5, "stale_after_s": 8}


def replicas() -> dict[str, int]:
    from ray import serve

    application = serve.status().applications.get("cedar")
    deployments = application.deployments if application else {}
    return {name: d.replica_states.get("RUNNING", 0) for name, d in deployments.items()}


def wait(name: str, count: int, within_s: float = 60) -> float:
    started_s = time.monotonic()
    while replicas().get(name) != count:
        assert time.monotonic() - started_s < within_s, f"{name} is not {count} but {replicas()}"
        time.sleep(0.2)
    return time.monotonic() - started_s


def main(folder: Path) -> None:
    from cedar.cluster.serve_app import deploy_schema
    from ray import serve
    from ray.serve.context import _get_global_client

    files = {name: folder / name for name in ("prefill", "decode")}
    for file in files.values():
        file.write_text("1")
    config = parse_config(
        {
            "model": {"path": "/none"},
            "prefill": {"autoscaling": SCALING},
            "decode": {"autoscaling": SCALING},
            "ray": {"cpus": 5},
        }
    )
    session = RaySession(config)
    session.start()
    try:
        serve.start(proxy_location="Disabled")
        arguments = {"config": config.model_dump(mode="json"), **{name: str(f) for name, f in files.items()}}
        _get_global_client().deploy_apps(deploy_schema(config, arguments, "autoscale_dummies:build"))
        wait("Prefill", 1)
        files["prefill"].write_text("5")
        up_s = wait("Prefill", 3)
        decode = replicas()["Decode"]
        files["prefill"].write_text("0")
        down_s = wait("Prefill", 1)
        print(json.dumps({"up_s": up_s, "down_s": down_s, "decode": decode}))
    finally:
        left = session.stop()
        assert not left, left


if __name__ == "__main__":
    main(Path(sys.argv[1]))
