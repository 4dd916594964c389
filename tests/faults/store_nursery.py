"""Starts store nodes quickly: imports what they need once, then forks a real node for each order.

One JSON line in, one out: ``{"argv": [...], "out": PATH}`` gives the pid of a node whose standard output goes
to PATH; ``{"wait": PID}`` gives its exit status, negative for a signal.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cedar.kvstore import node


def start(argv: list[str], out: str) -> int:
    """Fork a node."""
    pid = os.fork()
    if pid:
        return pid
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
    os.dup2(nothing, 2)
    try:
        status = node.main(argv)
    except BaseException:
        status = 70
    os._exit(status)


def main() -> None:
    """Take orders until the other side closes."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = start(order["argv"], order["out"])
        print(answer, flush=True)


if __name__ == "__main__":
    main()
