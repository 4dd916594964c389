"""Opens a segment in a process of its own, which a broken file may kill.

A start that was killed while it opened a segment may have been killed by the segment (a sector of its tree
that cannot be read is a SIGBUS), or by an impatient operator. This tells one from the other.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from cedar.kvstore.segment import Segment, SegmentDamaged

_TIMEOUT_S: Final = 60.0


def opens_elsewhere(path: Path, map_bytes: int) -> bool:
    """Whether another process can open the segment and walk its rows."""
    command = [sys.executable, "-m", "cedar.kvstore.segment_probe", str(path), str(map_bytes)]
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def main(path: str, map_bytes: str) -> int:
    """Exit status 0 when it opens."""
    try:
        segment = Segment(Path(path), 0, map_bytes=int(map_bytes), durable=True, created_s=None)
        rows = sum(1 for _ in segment.stored_rows())
        segment.close()
    except (SegmentDamaged, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
