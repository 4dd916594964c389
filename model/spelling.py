"""Finding control tokens in text, and keeping a person's words from being read as one.

A real vocabulary has about a thousand control tokens, most of them sharing a beginning, and texts have a
million characters: everything here first looks at a token's first few characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

_LEAD: Final = 5  # characters that spellings are grouped by


def spelling_pattern(spellings: Sequence[str]) -> re.Pattern[str]:
    """Matches the leftmost, longest of the given spellings; nothing when there are none."""
    families: dict[str, list[str]] = {}
    for spelling in sorted(spellings, key=len, reverse=True):
        families.setdefault(spelling[:_LEAD], []).append(re.escape(spelling[_LEAD:]))
    leads = sorted(families, key=len, reverse=True)
    pattern = "|".join(f"{re.escape(lead)}(?:{'|'.join(families[lead])})" for lead in leads)
    return re.compile(pattern or "(?!)")


class SpellingGuard:
    """Puts marks into text so that no control token can be read in it, nor across its ends."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self._spellings = tuple(spellings)
        self._leads = sorted({spelling[:_LEAD] for spelling in spellings})
        self._beginnings = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._endings = frozenset(s[-n:] for s in spellings for n in range(1, len(s)))
        self._longest = max(map(len, spellings), default=0)

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark`, a character it does not hold, wherever a spelling must be broken.

        Broken are spellings within the text, and those that text before and behind it could complete.
        Whitespace at the ends stays outermost, so that it may still be trimmed. Text near no spelling comes
        back as it is.
        """
        core = text.strip()
        if not core:
            return text
        cuts = self._cuts(core)
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(core)]
        broken = mark.join(core[a:b] for a, b in pairwise(edges))
        start = text.index(core)
        return text[:start] + broken + text[start + len(core) :]

    def _cuts(self, core: str) -> set[int]:
        """Offsets in `core` before which a mark goes."""
        cuts: set[int] = set()
        for lead in self._leads:
            at = core.find(lead)
            while at >= 0:
                cuts.add(at + 1)
                at = core.find(lead, at + 1)
        for length in range(1, min(len(core), self._longest - 1) + 1):
            if core[-length:] in self._beginnings:
                cuts.add(len(core) - length + 1)
            if core[:length] in self._endings:
                cuts.add(length - 1)
        if len(core) <= self._longest - 2 and any(core in spelling[1:-1] for spelling in self._spellings):
            cuts.add(1)
        return cuts
