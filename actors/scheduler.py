"""The engines' decisions as pure functions: where a prefill starts, how it is cut, when a stream ends.

Positions and lengths are tokens. ``W`` is the sliding window. Spec section 9.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cedar.actors.errors import BooksError
from cedar.v1.common_pb2 import FinishReason, PromptSources


@dataclass(frozen=True)
class Model:
    """The few numbers of a network that decisions depend on.

    ``encoder_layers``: layers below the first decoder layer, each of which carries a change in a window key
    at most ``window`` positions further.
    """

    page_tokens: int
    window: int
    encoder_layers: int
    context: int
    eos: int


@dataclass(frozen=True)
class HitPlan:
    """What to read before a prefill: ``local + stored`` leading pages, and the window record or not."""

    local: int
    stored: int
    record: bool

    @property
    def pages(self) -> int:
        """Leading pages that are expected from either source."""
        return self.local + self.stored


@dataclass(frozen=True)
class Prefix:
    """What has been read, verified and decided: where the prefill starts.

    ``pages`` leading pages are read and never written, ``local`` of them were in this worker's memory.
    Tokens ``[start, total)`` run. ``origin``: the encoder start that the sequence's values come from; 0 when
    they are those of a cold run. It is above 0 after a bounded replay, and stays so for what follows it.
    """

    local: int
    pages: int
    start: int
    origin: int
    restored: bool = False

    @property
    def after_replay(self) -> bool:
        """Whether pages sealed from here on depend slightly on where a hit was."""
        return self.origin > 0


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that ``tokens`` positions occupy."""
    return -(-tokens // page_tokens)


def decode_positions(length: int, generated: int, max_tokens: int, context: int) -> int:
    """Positions a request can ever occupy: ``length`` tokens now, ``generated`` of them counting as output.

    The last token that it may sample is never run, so it takes no position.
    """
    return max(length, min(length + max(max_tokens - generated, 1) - 1, context))


def plan_hits(
    model: Model, total: int, *, local: int, promised: int, record: int | None, first_start: int | None = None
) -> HitPlan:
    """What is worth reading for a prompt of ``total`` tokens.

    ``local``: leading pages here. ``promised``: leading pages the store said it holds. ``record``: position
    of the window record on offer. ``first_start``: set when a stream is resumed (see ``settle``).
    A record is taken when continuing from it runs no more tokens than a replay would; then pages past its
    position are not read, as the sequence writes them itself.
    """
    full = total // model.page_tokens
    local, promised = min(local, full), min(promised, full)
    pages = max(local, promised)
    if record is not None and 0 < record < total:
        under = record // model.page_tokens
        wanted = first_start is not None or record >= pages * model.page_tokens - model.window
        if under <= pages and wanted:
            return HitPlan(min(local, under), under - min(local, under), True)
    if _useless(model, pages):
        return HitPlan(0, 0, False)
    return HitPlan(local, pages - local, False)


def settle(
    model: Model,
    total: int,
    decoder_from: int,
    plan: HitPlan,
    *,
    arrived: int,
    record: int | None,
    record_origin: int = 0,
    first_start: int | None = None,
) -> Prefix:
    """Where the prefill starts, from what really arrived and was verified.

    ``arrived``: leading pages in memory now. ``record``: position of a verified window record, or None;
    ``record_origin``: the encoder start inside it. ``decoder_from``: see ``decoder_start``; only resuming
    needs it.

    - A record whose whole pages have arrived: the sequence continues exactly at its position.
    - Hits of more than W tokens: *encoder bounded replay* of the last W of them.
    - Otherwise cold.

    Resuming (``first_start`` is the origin of the attempt before): the state must come
    out as it was. The run starts so far ahead that the bound at its start cannot be felt at any position
    that is kept (``encoder_layers * W`` before the hits end and the decoder begins), but never below
    ``first_start``, where the first attempt was bounded in the same way.
    """
    local = min(plan.local, arrived)
    if record is not None and 0 < record < total and record // model.page_tokens <= arrived:
        under = record // model.page_tokens
        return Prefix(min(local, under), under, record, record_origin, restored=True)
    if _useless(model, arrived):
        return Prefix(0, 0, 0, 0)
    hits = arrived * model.page_tokens
    replay = hits - model.window
    if first_start is None:
        return Prefix(local, arrived, replay, replay)
    kept = min(hits, decoder_from)
    exact = kept - model.encoder_layers * model.window
    exact = max(0, exact // model.page_tokens * model.page_tokens)
    if first_start <= min(replay, decoder_from):
        return Prefix(local, arrived, max(exact, first_start), first_start)
    return Prefix(local, arrived, exact, 0)  # pages were lost since: come out as a cold run would


def decoder_start(model: Model, prompt: int, *, record: int | None, record_start: int = 0) -> int:
    """Where decoder window reads begin in a prompt that is not resumed (spec section 9).

    ``record``: position of the window record it goes on from, if any, and the decoder start inside: with less
    than W tokens to add the decoder reads on in the record's rings.
    """
    begins = max(0, prompt - model.window)
    return record_start if record is not None and begins < record else begins


def sources(model: Model, total: int, prefix: Prefix) -> PromptSources:
    """Where each token of the prompt came from; the parts add up to the whole, or it is a bug."""
    hit = prefix.pages * model.page_tokens
    state = prefix.start - hit if prefix.restored else 0
    replayed = 0 if prefix.restored else hit - prefix.start
    local = prefix.local * model.page_tokens
    computed = total - hit - state
    if min(state, replayed, computed, local, hit - local) < 0:
        raise BooksError(f"tokens of a prompt of {total} do not add up: {prefix}")
    return PromptSources(
        prompt_tokens=total,
        hit_local_tokens=local,
        hit_store_tokens=hit - local,
        state_tokens=state,
        computed_tokens=computed,
        replayed_tokens=replayed,
        state_restored=prefix.restored,
    )


def chunk_end(position: int, total: int, chunk_tokens: int) -> int:
    """End of the chunk that starts at ``position``: the next multiple of ``chunk_tokens``, or the end."""
    return min(total, (position // chunk_tokens + 1) * chunk_tokens)


def finish_reason(
    token: int,
    *,
    index: int,
    position: int,
    max_tokens: int,
    stop_ids: Collection[int],
    ignore_eos: bool,
    model: Model,
) -> FinishReason | None:
    """Whether a stream ends with this token, number ``index`` of its output, at ``position``."""
    if token in stop_ids or (token == model.eos and not ignore_eos):
        return FinishReason.FINISH_REASON_STOP
    if index + 1 >= max_tokens or position + 1 >= model.context:
        return FinishReason.FINISH_REASON_LENGTH
    return None


def draft_room(*, index: int, length: int, max_tokens: int, context: int) -> int:
    """How many proposals may follow the last token, number ``index`` of the output, at position ``length``.

    Each row that is verified gives one token, so one row more than there are proposals must be wanted, by
    ``max_tokens`` and by the context.
    """
    return max(0, min(max_tokens - index - 2, context - length - 2))


def _useless(model: Model, pages: int) -> bool:
    """Hits of at most W tokens: everything would be run again, so the prompt counts as cold."""
    return pages * model.page_tokens <= model.window
