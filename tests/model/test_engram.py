"""Engram rows: windows of tokens, hashes, and the table's way to a layer."""

from __future__ import annotations

import random

import pytest
import torch
from cedar.model.engram import EngramHasher, token_windows
from cedar.model.network import Network
from cedar.model.state import ImageSpan, SequenceState

Tensors = dict[str, torch.Tensor]


def hasher(network: Network) -> EngramHasher:
    assert network.text is not None
    assert network.text.hasher is not None
    return network.text.hasher


@pytest.mark.parametrize("prompt", ["text", "image"])
def test_golden_rows_in_any_chunks(network: Network, expected: Tensors, prompt: str) -> None:
    ids = expected[f"{prompt}/input_ids"][0].tolist()
    seq = SequenceState(slot=0, pages=[], ids=ids)
    if prompt == "image":
        seq.images = (ImageSpan(14, 17, 3, 4, b""),)
    rng = random.Random(1)
    for largest in (1, 3, 10, 200):
        begin, parts = 0, []
        while begin < len(ids):
            end = min(len(ids), begin + rng.randint(1, largest))
            parts.append(hasher(network).rows([(seq, begin, end)], range(12)))
            begin = end
        for layer in (1, 4):
            rows = torch.cat([part[layer] for part in parts])
            assert torch.equal(rows, expected[f"{prompt}/layer{layer:02d}.engram_hash"][0])


def test_several_sequences_at_once(network: Network, expected: Tensors) -> None:
    ids = expected["text/input_ids"][0].tolist()
    seqs = [SequenceState(slot=i, pages=[], ids=ids[i * 10 :]) for i in range(3)]
    spans = [(seqs[0], 0, 1), (seqs[1], 7, 20), (seqs[2], 33, 34)]
    together = hasher(network).rows(spans, range(12))
    alone = [hasher(network).rows([span], range(12)) for span in spans]
    for layer in (1, 4):
        assert torch.equal(together[layer], torch.cat([rows[layer] for rows in alone]))


def test_look_back_stops_at_the_start_and_at_images() -> None:
    seq = SequenceState(slot=0, pages=[], ids=[10, 11, 3, 3, 14, 15, 16, 17, 18])
    seq.images = (ImageSpan(2, 2, 1, 1, b""),)
    wanted = [
        [10, -1, -1, -1],
        [11, 10, -1, -1],
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
        [14, -1, -1, -1],
        [15, 14, -1, -1],
        [16, 15, 14, -1],
        [17, 16, 15, 14],
        [18, 17, 16, 15],
    ]
    for begin in range(9):
        for end in range(begin + 1, 10):
            assert token_windows(seq, begin, end, 4).tolist() == wanted[begin:end]


def test_tables_stay_on_disk_until_touched(network: Network) -> None:
    assert network.text is not None
    engram = network.text.layers[1].engram
    assert engram is not None
    assert engram.table.shape == (434, 32)
    assert engram.table.device.type == "cpu"
