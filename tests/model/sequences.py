"""Memory and sequences as the tests of this folder use them."""

from __future__ import annotations

import torch
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState

LEFTOVER = 0xFF  # NaN as a payload and as a scale of every format


def leftover_memory(network: Network, pages: int = 64, slots: int = 8) -> KVMemory:
    """Memory full of another life's leftovers, all NaN: a result that a foreign row reaches shows it."""
    memory = network.allocate(pages=pages, slots=slots)
    memory.pages.fill_(LEFTOVER)
    memory.rings.fill_(LEFTOVER)
    memory.tails.fill_(torch.nan)
    memory.draft_rings.fill_(LEFTOVER)
    return memory


def sequence(network: Network, ids: list[int], slot: int = 0, first_page: int = 0) -> SequenceState:
    """A sequence with its pages in an order that is not that of memory."""
    count = -(-len(ids) // network.layout.page_tokens)
    pages = [first_page + i for i in range(count)]
    return SequenceState(slot=slot, pages=pages[::-1], ids=ids)


def run(
    network: Network, memory: KVMemory, seq: SequenceState, cuts: list[int], **kwargs: object
) -> torch.Tensor:
    """Prefill up to each cut in turn, then finish; logits of the last position."""
    for upto in cuts:
        network.prefill(memory, seq, upto, **kwargs)  # type: ignore[arg-type]
    return network.finish_prefill(memory, seq)


def snapshot(memory: KVMemory) -> list[torch.Tensor]:
    """Copies of all its bits, to be compared after a call that must change none."""
    return [
        part.view(torch.uint8).clone()
        for part in (memory.pages, memory.rings, memory.tails, memory.draft_rings)
    ]


def unchanged(memory: KVMemory, before: list[torch.Tensor]) -> bool:
    """Whether the memory holds the same bits."""
    return all(torch.equal(a, b) for a, b in zip(snapshot(memory), before, strict=True))
