"""Errors of the cluster package. Four kinds: caller's fault, unavailable, corrupt, bug (crash)."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot be used; the message names field, value and limit."""


class CallerError(ValueError):
    """The client's fault: said to the client with the field, its value and the limit.

    ``field``: dotted path in the request. ``value``, ``limit``: as text.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}: {value} ({limit})")
        self.field = field
        self.value = value
        self.limit = limit


class Unauthenticated(ValueError):
    """The request carries no API key, or one that the configuration does not know."""


class Overloaded(RuntimeError):
    """No room now. ``retry_after_ms``: when to come back."""

    def __init__(self, reason: str, retry_after_ms: int) -> None:
        super().__init__(f"{reason}; retry in {retry_after_ms} ms")
        self.reason = reason
        self.retry_after_ms = retry_after_ms


class NoWorker(RuntimeError):
    """No live worker of a stage is known. ``stage``: encoder, prefill or decode."""

    def __init__(self, stage: str, detail: str = "") -> None:
        super().__init__(f"no live {stage} worker{': ' + detail if detail else ''}")
        self.stage = stage


class LaunchError(RuntimeError):
    """A cluster did not start. ``step``: the step of ``cedar.cluster.progress`` that failed."""

    def __init__(self, step: str, detail: str) -> None:
        super().__init__(f"{step}: {detail}")
        self.step = step
        self.detail = detail


class PortInUse(LaunchError):
    """A port of the gateway is taken by another process. ``field``: the setting that names it."""

    def __init__(self, host: str, port: int, field: str = "gateway.port") -> None:
        super().__init__("gateway", f"{field}: {host}:{port} is in use; choose another, or 0 for a free one")
        self.host = host
        self.port = port


class NameTaken(LaunchError):
    """A cluster of this name runs on this machine. ``pid``: of the process that owns it."""

    def __init__(self, name: str, pid: int) -> None:
        detail = f"cluster {name!r} runs already (process {pid}); stop it, or choose another name with --name"
        super().__init__("ray", detail)
        self.name = name
        self.pid = pid


class ClusterNotFound(LookupError):
    """No running cluster of that name has a state file on this machine."""
