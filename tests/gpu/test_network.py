"""The whole network on a CUDA device: every path runs there, and agrees with the CPU reference.

Free-running logits of another arithmetic scatter by a few per cent (rounding flips selections), so agreement
here means: the same paths, finite, and within that scatter. Exactness is the CPU's; the tolerances of single
kernels are theirs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from cedar.model import load_network
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState
from cedar.model.window_record import export_window, import_window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
SCATTER = 0.2
IDS = [0, *[(i * 37 + 11) % 600 + 5 for i in range(139)]]


@cache
def network(device: str) -> Network:
    return load_network(GOLDEN, device=device)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.device.type == "cuda"
    assert got.isfinite().all()
    error = (got.cpu().double() - want.double()).norm() / want.double().norm()
    assert error < SCATTER, float(error)


@pytest.mark.parametrize("replay", [True, False])
def test_logits(replay: bool) -> None:
    near(network("cuda").logits(IDS, replay=replay), network("cpu").logits(IDS, replay=replay))


def test_an_image() -> None:
    picture = (GOLDEN / "image.png").read_bytes()
    ids = [0, 9, *[3] * 17, 12, 40, 77]
    near(network("cuda").logits(ids, images=[picture]), network("cpu").logits(ids, images=[picture]))


def filled(net: Network) -> tuple[KVMemory, list[SequenceState]]:
    memory = KVMemory.allocate(net.config, net.layout, pages=20, slots=4, device=net.device)
    seqs = [
        SequenceState(slot=i, pages=[5 * i + j for j in range(5)], ids=IDS[7 * i :] + IDS[: 7 * i])
        for i in range(3)
    ]
    for i, seq in enumerate(seqs):
        for upto in (33, 60 + i):
            net.prefill(memory, seq, upto)
        net.finish_prefill(memory, seq)
    return memory, seqs


def test_chunks_and_batched_decode() -> None:
    cuda, cpu = filled(network("cuda")), filled(network("cpu"))
    for _ in range(4):
        near(network("cuda").decode(*cuda), network("cpu").decode(*cpu))


def test_a_window_record_moves_between_slots() -> None:
    net = network("cuda")
    memory, seqs = filled(net)
    seq = seqs[1]
    moved = SequenceState(slot=3, pages=[15, 16, 17, 18, 19], ids=seq.ids)
    memory.pages[15] = memory.pages[seq.pages[0]]
    import_window(net, memory, moved, export_window(net, memory, seq))
    assert export_window(net, memory, moved) == export_window(net, memory, seq)
    near(net.decode(memory, [moved]), net.decode(memory, [seq]).cpu())
