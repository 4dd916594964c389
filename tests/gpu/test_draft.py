"""Drafting on a CUDA device: proposals near the CPU's, verified rows near single steps, the same answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from cedar.model import load_network
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState
from cedar.model.verification import rows_kept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAINED = Path(__file__).parents[2] / "training" / "checkpoint"
SCATTER = 0.2
COUNT = 24


@cache
def network(device: str) -> Network:
    return load_network(TRAINED, device=device, drafting=True)


def prompts() -> list[list[int]]:
    vocabulary = network("cpu").config.vocab_size
    return [
        [0, *[(i * 53 + 7 * length) % (vocabulary - 10) + 5 for i in range(length)]]
        for length in (40, 127, 300)
    ]


def begun(net: Network) -> tuple[KVMemory, list[SequenceState]]:
    """Every prompt prefilled, with its first token."""
    memory = net.allocate(pages=12, slots=3)
    seqs = []
    for slot, ids in enumerate(prompts()):
        seq = SequenceState(slot=slot, pages=list(range(4 * slot, 4 * slot + 4)), ids=list(ids))
        net.prefill(memory, seq, len(ids))
        seq.ids.append(int(net.finish_prefill(memory, seq).argmax()))
        seqs.append(seq)
    return memory, seqs


def test_proposals_are_those_of_the_cpu() -> None:
    got, want = (net.propose(*begun(net)) for net in (network("cuda"), network("cpu")))
    assert (got.tokens.cpu() == want.tokens).double().mean() > 0.8
    for ours, theirs in ((got.logits, want.logits), (got.confidence, want.confidence)):
        assert (ours.cpu().double() - theirs.double()).norm() / theirs.double().norm() < SCATTER


def test_verified_rows_are_single_steps() -> None:
    net = network("cuda")
    memory, seqs = begun(net)
    proposed = net.propose(memory, seqs).chosen([5, 2, 0])
    verification = net.verify(memory, seqs, proposed)
    other, plain = begun(net)
    for seq, rows, tokens in zip(plain, verification.rows, proposed, strict=True):
        for row, token in zip(rows, [*tokens, 5], strict=True):
            want = net.decode(other, [seq])[0]
            assert (verification.logits[row] - want).norm() / want.norm() < SCATTER
            seq.ids.append(token)


def test_drafted_tokens_are_the_undrafted_ones() -> None:
    """But for near ties, which another order of sums may turn."""
    net = network("cuda")
    memory, plain = begun(net)
    for _ in range(COUNT):
        for seq, token in zip(plain, net.decode(memory, plain).argmax(-1).tolist(), strict=True):
            seq.ids.append(token)
    memory, seqs = begun(net)
    for number, seq in enumerate(seqs):
        while len(seq.ids) <= len(plain[number].ids):
            proposed = net.propose(memory, [seq]).chosen([5])
            verification = net.verify(memory, [seq], proposed)
            said = verification.logits.argmax(-1).tolist()
            kept = rows_kept(proposed[0], said)
            verification.commit([kept])
            seq.ids += said[:kept]
    same = [
        token == other
        for seq, reference in zip(seqs, plain, strict=True)
        for token, other in zip(seq.ids[len(reference.ids) - COUNT :], reference.ids[-COUNT:], strict=False)
    ]
    assert sum(same) / len(same) > 0.7
