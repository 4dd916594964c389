"""Where images lie in a prompt. Standard library only: whoever builds prompts needs no tensors for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageSpan:
    """Positions [start, start + length) of a prompt that stand for one image: start row, grid rows, newlines,
    end.

    `rows` x `columns` is the token grid; `content_hash` names the features.
    """

    start: int
    length: int
    rows: int
    columns: int
    content_hash: bytes

    @property
    def end(self) -> int:
        """First position after the image."""
        return self.start + self.length
