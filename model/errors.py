"""The faults that `cedar.model` says to its caller. Each names the field, its value and what is allowed."""

from __future__ import annotations


class ModelError(ValueError):
    """Base of every fault of the caller's that this package reports."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{self.subject}{field}={_shorten(value)}, must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    subject = ""


class ConfigError(ModelError):
    """`config.json` describes no network that can be built."""

    subject = "config: "


class CheckpointError(ModelError):
    """A checkpoint's files contradict their own headers, or the config."""

    subject = "checkpoint: "


class InputError(ModelError):
    """Token ids or images that the network cannot run."""

    subject = "input: "


class RecordError(ModelError):
    """A window record that is damaged or belongs to another network, format or sequence."""

    subject = "window record: "


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
