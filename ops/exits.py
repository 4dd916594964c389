"""Exit codes of the ``cedar`` command, and how an error becomes one line and a code.

=====  ==========================================================================
code   meaning
=====  ==========================================================================
0      done
1      it ran and failed: a tensor over its tolerance, a request that failed
2      the caller's mistake: an argument, a configuration, a prompt, a checkpoint
3      no cluster there, or it does not answer
4      the cluster is full; the message says when to come back
5      the deadline passed
130    interrupted; the request was cancelled first
=====  ==========================================================================
"""

from __future__ import annotations

from enum import IntEnum
from signal import SIGTERM


class Exit(IntEnum):
    """Exit codes; the module docstring is the table."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    BUSY = 4
    DEADLINE = 5
    INTERRUPTED = 130


class CommandError(ValueError):
    """A failure that the user should read as one line. ``code`` is the exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


def explain(error: BaseException) -> tuple[str, Exit] | None:
    """Return (message, exit code) for an error that is not a bug, None for a bug.

    The packages raise their own classes for what a caller can mend (subclasses of ValueError,
    LookupError or RuntimeError defined under ``cedar``); everything else keeps its traceback.
    """
    if isinstance(error, CommandError):
        return str(error), error.code
    terminated = isinstance(error, SystemExit) and error.code == SIGTERM  # as Ray ends a start in progress
    if terminated or isinstance(error, KeyboardInterrupt):
        return "interrupted", Exit.INTERRUPTED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", Exit.USAGE
    if type(error).__module__.startswith("cedar."):
        from cedar.cluster.errors import ClusterNotFound, NameTaken, PortInUse
        from cedar.kvstore.errors import NodeUnreachable

        if isinstance(error, ClusterNotFound | NodeUnreachable):
            return str(error.args[0]), Exit.UNREACHABLE
        if isinstance(error, ValueError | NameTaken | PortInUse):
            return str(error), Exit.USAGE
        if isinstance(error, LookupError | RuntimeError):
            return str(error), Exit.FAILED
    return None
