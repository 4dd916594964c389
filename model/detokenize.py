"""Token by token back to text: no half characters, no part of a stop string, whatever the tokens' boundaries.

A stop string counts where it is first complete: of several, the one that ends first wins, and of those that
end together the longest. The text ends where the winner begins. `cut_at_stop` states that rule on a whole
text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from cedar.model.prompt_errors import SamplingError
from cedar.model.tokenizer import Tokenizer


class StopMatcher:
    """Passes text through until a stop string is complete, holding back only what could still become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise SamplingError("stop", list(stops), "without empty strings")
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None
        """The stop string that matched, once one has."""

    def push(self, text: str) -> str:
        """The text that `text` makes certain. Empty after a match."""
        if self.stop is not None:
            return ""
        pending = self._held + text
        match = _first_complete(pending, self._stops)
        if match is not None:
            start, self.stop = match
            self._held = ""
            return pending[:start]
        keep = max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """The text of one growing reply. Owned by one request.

    `hidden` are ids that add no text, such as the end token. After `stop` is set nothing more is returned.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), hidden: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(hidden)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matcher.stop

    def push(self, token_id: int) -> str:
        """The text that this token makes certain: none while a character or possible stop string is open."""
        if token_id in self._hidden:
            return ""
        return self._matcher.push(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest, when no more tokens come: an unfinished character becomes U+FFFD. Idempotent."""
        tail = self._matcher.push(self._decoder.decode(b"", final=True))
        return tail + self._matcher.flush()


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The whole text up to the first stop string, and that stop string (None when there is none)."""
    match = _first_complete(text, stops)
    return (text, None) if match is None else (text[: match[0]], match[1])


def _first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Start and stop string of the match that ends first, the longest of those that end together."""
    found = ((text.find(stop), stop) for stop in stops)
    ends = ((start + len(stop), start, stop) for start, stop in found if start >= 0)
    best = min(ends, default=None)
    return None if best is None else best[1:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
