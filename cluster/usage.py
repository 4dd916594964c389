"""One request's account: where its prompt came from, what crossed each boundary, where the time went. Pure.

Sources are those of the first admission: a retry computes again but the prompt is not counted again.
Traffic is a sum over attempts: it did cross. Times are those of the attempt that succeeded, plus waits.
"""

from __future__ import annotations

from cedar.v1 import common_pb2 as common
from cedar.v1 import stages_pb2 as stages


class Account:
    """Filled while a request lives. ``arrived_s``: on the loop's clock."""

    def __init__(self, arrived_s: float) -> None:
        self._arrived_s = arrived_s
        self.sources: common.PromptSources | None = None
        self.traffic = common.Traffic()
        self.times = common.StageTimes()

    def waited(self, seconds: float) -> None:
        """Time in a queue of the gateway."""
        self.times.queue_s += seconds

    def encoded(self, images: int, seconds: float) -> None:
        """Images that the Encoder had to run, and how long the prompt waited for all of them."""
        self.traffic.images_encoded += images
        self.times.encoder_s += seconds

    def admitted(self, sources: common.PromptSources) -> bool:
        """Whether this was the first admission."""
        first = self.sources is None
        if first:
            self.sources = sources
        return first

    def first_token(self, now_s: float) -> None:
        """The first token has come."""
        if not self.times.ttft_s:
            self.times.ttft_s = now_s - self._arrived_s

    def prefilled(self, done: stages.PrefillDone) -> None:
        """Prefill's account of an attempt."""
        add_traffic(self.traffic, done.traffic)
        self.times.queue_s += done.queue_s
        self.times.prefill_s += done.compute_s
        self.times.handoff_s += done.handoff_s

    def decoded(self, end: stages.StreamEnd) -> None:
        """Decode's account of an attempt."""
        self.traffic.pages_sealed += end.pages_sealed
        self.traffic.pages_stored += end.pages_stored
        self.times.decode_s += end.decode_s


def add_traffic(total: common.Traffic, part: common.Traffic) -> None:
    """Add ``part`` to ``total``, field by field. ``pages_hit`` is a fact of the prompt, so it is not
    summed."""
    for field in common.Traffic.DESCRIPTOR.fields:
        value = getattr(part, field.name)
        if field.name == "pages_hit":
            value = max(value - total.pages_hit, 0)
        setattr(total, field.name, getattr(total, field.name) + value)


def prompt_tokens_balance(sources: common.PromptSources) -> bool:
    """Whether the prompt is the sum of its sources."""
    parts = (
        sources.hit_local_tokens + sources.hit_store_tokens + sources.state_tokens + sources.computed_tokens
    )
    return parts == sources.prompt_tokens
