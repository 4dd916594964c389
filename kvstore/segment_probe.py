"""Opens a segment's index in a process of its own, which a broken file may kill.

A start that was killed while it read an index may have been killed by it (a tree whose pointers lead nowhere
can be a SIGBUS), or by an impatient operator. This tells one from the other.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from cedar.kvstore.segment_index import IndexDamaged, read_index

_TIMEOUT_S: Final = 60.0


def index_opens_elsewhere(path: Path) -> bool:
    """Whether another process can read the index of the segment in ``path``."""
    command = [sys.executable, "-m", "cedar.kvstore.segment_probe", str(path)]
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def main(path: str) -> int:
    """Exit status 0 when it can be read."""
    try:
        found = read_index(Path(path))
    except (IndexDamaged, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(found.rows) if found else 0} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
