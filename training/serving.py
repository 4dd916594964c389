"""Prompts answered greedily by the served network, in every way that serving may come to them (spec §9).

A way (`ways.py`) says how the prompt's state came to be: cold with decoder bounded replay, every layer for
every token, a prefix hit at P with its window record, or a prefix hit at P with only the pages; and whether
tokens are drafted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cedar.model.checkpoint import Checkpoint
from cedar.model.inputs import image_spans
from cedar.model.loading import build_network
from cedar.model.network import Network
from cedar.model.spans import ImageSpan
from cedar.model.state import KVMemory, SequenceState
from cedar.model.verification import rows_kept
from cedar.model.window_record import export_window, import_window
from cedar.training.tokenization import Encoded
from cedar.training.ways import SERVED_WAYS as SERVED_WAYS  # read from here by callers that serve
from cedar.training.ways import WAYS as WAYS
from cedar.training.ways import Way as Way
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids up to where the answer begins, with the images' rows."""

    ids: list[int]
    images: tuple[ImageSpan, ...]
    features: Mapping[bytes, Tensor]


def built_in_model() -> Path:
    """The small checkpoint that comes with the package."""
    from importlib.resources import files

    return Path(str(files("cedar.training"))) / "checkpoint"


def load(folder: Path, *, pool: bool = True, drafting: bool = False, device: str = "cpu") -> Network:
    """The checkpoint's network; without the pool, reindexing layers select among all entries."""
    checkpoint = Checkpoint.open(str(folder))
    if not pool:
        config = dataclasses.replace(checkpoint.config, candidate_source_layer_id=None)
        checkpoint = dataclasses.replace(checkpoint, config=config)
    return build_network(checkpoint, torch.device(device), None, drafting=drafting)


def prompt_of(network: Network, item: Encoded, end: int) -> Prompt:
    """The first `end` positions of an encoded conversation."""
    ids = item.ids[:end]
    shown = [image for image, at in zip(item.images, item.spans, strict=True) if at < end]
    prepared = [network.prepare(image) for image in shown]
    spans = image_spans(ids, [(p.plan, p.content_hash) for p in prepared], network.config.image_token_id)
    return Prompt(ids, spans, {p.content_hash: network.encode_image(p) for p in prepared})


@dataclass(eq=False)
class Answer:
    """Greedy ids, and what the draft stages had to do with them."""

    ids: list[int]
    steps: int = 0  # verifications
    proposed: int = 0
    accepted: int = 0


def answer(network: Network, prompt: Prompt, way: Way, limit: int) -> list[int]:
    """Greedy ids after the prompt, at most `limit`, up to and with the end token."""
    return respond(network, [prompt], way, [limit])[0].ids


@torch.no_grad()
def respond(network: Network, prompts: Sequence[Prompt], way: Way, limits: Sequence[int]) -> list[Answer]:
    """An answer to each prompt, at most so many ids long: prompts run one by one, answers together."""
    if not way.packed:
        raise ValueError("way.packed is False, must be True: the served network has packed pages only")
    size = network.layout.page_tokens
    needed = [-(-(len(p.ids) + limit) // size) for p, limit in zip(prompts, limits, strict=True)]
    memory = network.allocate(pages=2 * sum(needed), slots=len(prompts) + 1)
    answers, seqs, begin = [], [], 0
    for slot, (prompt, pages) in enumerate(zip(prompts, needed, strict=True)):
        own = list(range(begin, begin + pages))
        begin += 2 * pages
        seq = SequenceState(slot=slot, pages=own, ids=list(prompt.ids), images=prompt.images)
        hit = int(len(prompt.ids) * way.hit) // size * size
        if hit:
            _take_hit(network, memory, seq, prompt, hit, way, donor=len(prompts), free=own[-1] + 1)
        _prefill(network, memory, seq, prompt, len(prompt.ids), replay=way.replay)
        answers.append(Answer([int(network.finish_prefill(memory, seq).argmax())]))
        seqs.append(seq)
    running = list(range(len(prompts)))
    while running := [n for n in running if not _ended(network, answers[n], limits[n])]:
        rooms = [limits[n] - len(answers[n].ids) - 1 for n in running]
        for n in running:
            seqs[n].ids.append(answers[n].ids[-1])
        advance = _draft if way.drafting else _step
        advance(network, memory, [seqs[n] for n in running], [answers[n] for n in running], rooms)
    return answers


def _ended(network: Network, answer: Answer, limit: int) -> bool:
    return len(answer.ids) >= limit or answer.ids[-1] == network.config.eos_token_id


def _step(
    network: Network, memory: KVMemory, seqs: list[SequenceState], answers: list[Answer], rooms: list[int]
) -> None:
    """One token for each sequence."""
    for answer, token in zip(answers, network.decode(memory, seqs).argmax(-1).tolist(), strict=True):
        answer.ids.append(token)


def _draft(
    network: Network, memory: KVMemory, seqs: list[SequenceState], answers: list[Answer], rooms: list[int]
) -> None:
    """What the backbone agrees with of a block, and its own next token, for each sequence."""
    proposed = network.propose(memory, seqs).chosen(rooms)
    verification = network.verify(memory, seqs, proposed)
    said = verification.logits.argmax(-1).tolist()
    kept = []
    for answer, tokens, rows in zip(answers, proposed, verification.rows, strict=True):
        own = said[rows.start : rows.stop]
        if network.config.eos_token_id in own:
            own = own[: own.index(network.config.eos_token_id) + 1]
        kept.append(rows_kept(tokens, own))
        answer.ids += own[: kept[-1]]
        answer.steps += 1
        answer.proposed += len(tokens)
        answer.accepted += kept[-1] - 1
    verification.commit(kept)
    for seq, answer, count in zip(seqs, answers, kept, strict=True):
        seq.ids += answer.ids[len(answer.ids) - count : -1]


def _take_hit(
    network: Network,
    memory: KVMemory,
    seq: SequenceState,
    prompt: Prompt,
    hit: int,
    way: Way,
    *,
    donor: int,
    free: int,
) -> None:
    """Bring `seq` to where it goes on from a hit of `hit` tokens, whose pages come as if from a store.

    They are made in slot `donor` and pages from `free` on.
    """
    shared = hit // network.layout.page_tokens
    other = list(range(free, free + shared))
    first = SequenceState(slot=donor, pages=other, ids=list(prompt.ids), images=prompt.images)
    _prefill(network, memory, first, prompt, hit, replay=True)
    network.finish_prefill(memory, first)
    seq.pages[:shared] = other
    if way.record:
        import_window(network, memory, seq, export_window(network, memory, first))
        return
    layers = network.config.decoder_start_layer if way.exact else 1
    seq.length = seq.encoder_start = max(0, hit - layers * network.config.window)
    seq.write_from = hit


def _prefill(
    network: Network, memory: KVMemory, seq: SequenceState, prompt: Prompt, upto: int, *, replay: bool
) -> None:
    while seq.length < upto:
        end = min(seq.length + network.chunk_tokens, upto)
        network.prefill(memory, seq, end, prompt.features, replay=replay)
