"""A row of a quality table: right answers over questions asked, with the interval that the count supports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final

_Z: Final = 1.959964  # 95 %, two-sided


def interval(right: int, asked: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, which is honest also when every answer is right."""
    if not 0 <= right <= asked or not asked:
        raise ValueError(f"right {right} of asked {asked}, must be from 0 to asked, which is above 0")
    share, z2 = right / asked, _Z * _Z
    middle = share + z2 / (2 * asked)
    spread = _Z * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked * asked))
    low, high = ((middle + sign * spread) / (1 + z2 / asked) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task in one way.

    `differing`: answers that are not the same way's without drafting, token for token; None where that was
    not compared. `steps`: verifications, which gave `told` tokens, `accepted` of `proposed` among them.
    """

    task: str
    way: str
    right: int
    asked: int
    differing: int | None = None
    steps: int = 0
    told: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_a_step(self) -> float | None:
        """The acceptance length: tokens that a verification gave, the backbone's own one included."""
        return self.told / self.steps if self.steps else None

    def line(self) -> str:
        """The row for people."""
        low, high = (100 * edge for edge in interval(self.right, self.asked))
        text = (
            f"{self.task:32} {self.way:36} {self.right:4} / {self.asked:<4} "
            f"{100 * self.right / self.asked:6.1f} %  [{low:5.1f}, {high:5.1f}]"
        )
        if self.tokens_a_step is not None:
            text += f"  {self.tokens_a_step:.2f} tokens a step, {self.accepted} of {self.proposed} accepted"
        if self.differing is not None:
            text += f", {self.differing} answers differ"
        return text

    def record(self) -> dict[str, object]:
        """The row for programs."""
        low, high = interval(self.right, self.asked)
        return {**asdict(self), "low": low, "high": high, "tokens_a_step": self.tokens_a_step}
