"""A small text that outlives the process: replaced whole or not at all, on disk when ``save`` returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class StateText(Protocol):
    """Where such a text is kept."""

    def load(self) -> str | None:
        """The text; None when there is none. OSError."""

    def save(self, text: str) -> None:
        """Replace it. OSError when the disk will not, and then the old one stays."""


class StateFile:
    """The text in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> str | None:
        """The file's text; None when there is no file."""
        try:
            return self.path.read_text("utf-8")
        except FileNotFoundError:
            return None

    def save(self, text: str) -> None:
        """Write beside it, sync, and rename."""
        fresh = self.path.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
