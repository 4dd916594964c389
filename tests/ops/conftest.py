"""What the tests of the command line share."""

from __future__ import annotations

import sys

import pytest

LISTEN = (
    "import os, signal, sys;"
    "signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.executable, sys.argv[1:])"
)


@pytest.fixture
def cedar_command() -> list[str]:
    """Start of a command line that runs ``cedar`` and hears Ctrl-C.

    A shell starts its background jobs deaf to SIGINT, and children inherit that; so may this test run.
    """
    return [sys.executable, "-c", LISTEN, sys.executable, "-m", "cedar.ops.cli"]
