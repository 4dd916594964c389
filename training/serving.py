"""One prompt answered greedily by the served network, in every way that serving may come to it (spec §9).

A way says how the prompt's state came to be: cold with decoder bounded replay, every layer for every token, a
prefix hit at P with its window record, or a prefix hit at P with only the pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from cedar.model.checkpoint import Checkpoint
from cedar.model.inputs import image_spans
from cedar.model.loading import build_network
from cedar.model.network import Network
from cedar.model.spans import ImageSpan
from cedar.model.state import KVMemory, SequenceState
from cedar.model.window_record import export_window, import_window
from cedar.training.tokenization import Encoded
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the prompt's state comes to be. `hit`: share of the prompt found, rounded down to whole pages."""

    name: str
    replay: bool = True
    hit: float = 0.0
    record: bool = False  # the hit has its window record
    pool: bool = True


WAYS = (
    Way(name="cold, bounded replay"),
    Way(name="cold, every layer for every token", replay=False),
    Way(name="cold, no candidate pool", pool=False),
    Way(name="hit at 1/2, window record", hit=0.5, record=True),
    Way(name="hit at 1/2, replay", hit=0.5),
    Way(name="hit at 9/10, replay", hit=0.9),
)


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


def load(folder: Path, *, pool: bool = True, device: str = "cpu") -> Network:
    """The checkpoint's network; without the pool, reindexing layers select among all entries."""
    checkpoint = Checkpoint.open(str(folder))
    if not pool:
        config = dataclasses.replace(checkpoint.config, candidate_source_layer_id=None)
        checkpoint = dataclasses.replace(checkpoint, config=config)
    return build_network(checkpoint, torch.device(device), None)


def prompt_of(network: Network, item: Encoded, end: int) -> Prompt:
    """The first `end` positions of an encoded conversation."""
    ids = item.ids[:end]
    shown = [image for image, at in zip(item.images, item.spans, strict=True) if at < end]
    prepared = [network.prepare(image) for image in shown]
    spans = image_spans(ids, [(p.plan, p.content_hash) for p in prepared], network.config.image_token_id)
    return Prompt(ids, spans, {p.content_hash: network.encode_image(p) for p in prepared})


@torch.no_grad()
def answer(network: Network, prompt: Prompt, way: Way, limit: int) -> list[int]:
    """Greedy ids after the prompt, at most `limit`, up to and with the end token."""
    size = network.layout.page_tokens
    pages = -(-(len(prompt.ids) + limit) // size)
    memory = KVMemory.allocate(
        network.config, network.layout, pages=2 * pages, slots=2, device=network.device
    )
    seq = SequenceState(slot=0, pages=list(range(pages)), ids=list(prompt.ids), images=prompt.images)
    hit = int(len(prompt.ids) * way.hit) // size * size
    if hit:
        seq = _after_hit(network, memory, seq, prompt, hit, way)
    _prefill(network, memory, seq, prompt, len(prompt.ids), replay=way.replay)
    logits = network.finish_prefill(memory, seq)
    out: list[int] = []
    while len(out) < limit:
        out.append(int(logits.argmax()))
        if out[-1] == network.config.eos_token_id:
            break
        seq.ids.append(out[-1])
        logits = network.decode(memory, [seq])[0]
    return out


def _after_hit(
    network: Network, memory: KVMemory, first: SequenceState, prompt: Prompt, hit: int, way: Way
) -> SequenceState:
    """A second sequence that shares the first `hit` tokens' pages, as if they came from a store."""
    _prefill(network, memory, first, prompt, hit, replay=True)
    network.finish_prefill(memory, first)
    shared = hit // network.layout.page_tokens
    pages = first.pages[:shared] + [page + len(first.pages) for page in first.pages[shared:]]
    second = SequenceState(slot=1, pages=pages, ids=list(prompt.ids), images=prompt.images)
    if way.record:
        import_window(network, memory, second, export_window(network, memory, first))
        return second
    second.length = second.encoder_start = max(0, hit - network.config.window)
    second.write_from = hit
    return second


def _prefill(
    network: Network, memory: KVMemory, seq: SequenceState, prompt: Prompt, upto: int, *, replay: bool
) -> None:
    while seq.length < upto:
        end = min(seq.length + network.chunk_tokens, upto)
        network.prefill(memory, seq, end, prompt.features, replay=replay)
