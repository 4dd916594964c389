"""Memory and sequences as the tests of this folder use them."""

from __future__ import annotations

import torch
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState


def leftover_memory(network: Network, pages: int = 64, slots: int = 8) -> KVMemory:
    """Memory full of another life's leftovers: whatever reads a row it does not own gives other numbers."""
    memory = KVMemory.allocate(network.config, network.layout, pages=pages, slots=slots, device="cpu")
    memory.pages.fill_(0x5A)
    memory.rings.fill_(0x5A)
    memory.tails.fill_(1e9)
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
