"""Keys expanded once for a chunk (`kernels.wide_keys`): every kind of layer reads the right ones.

The decision is made to say yes, and the reference then reads expanded keys: a wrong source, a stale buffer or
a wrong row gives other numbers. Memory starts full of leftovers, see conftest.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cedar.kernels import wide_keys_ref
from cedar.kernels.wide_keys import Shape, WideKeys
from cedar.model import attention
from cedar.model.network import Network
from cedar.model.schedule import LayerMode
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step

from .sequences import leftover_memory, run, sequence

Tensors = dict[str, torch.Tensor]
PAGE, WINDOW = 32, 16


@pytest.fixture(scope="module")
def ids(expected_ced: Tensors) -> list[int]:
    """209 tokens of prompt and 32 generated ones."""
    return expected_ced["long/input_ids"].tolist() + expected_ced["long/tokens"].tolist()


@pytest.fixture
def expanding(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[WideKeys | None]]:
    """Says whether chunks expand from here on; what the attention of each layer was given from then on."""
    attend = attention.sparse_attention

    def say(answer: bool) -> list[WideKeys | None]:
        given: list[WideKeys | None] = []

        def seen(*args: Any, **more: Any) -> torch.Tensor:
            given.append(args[11])
            return attend(*args, **more)

        monkeypatch.setattr(attention, "expands", lambda like, shape, **sizes: answer)
        monkeypatch.setattr(attention, "sparse_attention", seen)
        return given

    return say


def same(network: Network, given: list[WideKeys | None], layers: range) -> None:
    """Each layer had wide keys: those who share a source the same entries, others' none of them."""
    assert len(given) == len(layers)
    by_source: dict[int | None, set[int]] = {}
    for layer, keys in zip(layers, given, strict=True):
        assert keys is not None
        plan = network.plan[layer]
        assert (keys.entries is None) == (plan.mode is LayerMode.SWA)
        by_source.setdefault(plan.kv_source, set()).add(id(keys.entries))
    assert all(len(buffers) == 1 for buffers in by_source.values())
    assert len(set.union(*by_source.values())) == len(by_source)


@pytest.mark.parametrize("cuts", [[209], [40, 41, 130, 209], [100, 209]])
def test_chunks_of_a_prompt(
    network: Network, ids: list[int], expanding: Callable[[bool], list[WideKeys | None]], cuts: list[int]
) -> None:
    """The encoder's layers in every chunk, the decoder's in the replay; rings and pages as they would be."""
    results = []
    for answer in (False, True):
        memory, given = leftover_memory(network), expanding(answer)
        seq = sequence(network, ids[:209], slot=2, first_page=5)
        logits = run(network, memory, seq, cuts)
        results.append((logits, memory.pages, memory.rings))
        split = network.config.decoder_start_layer
        if answer:
            for number, (begin, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
                part = given[number * split : (number + 1) * split]
                if end - begin > 1:
                    same(network, part, range(split))
                else:
                    assert part == [None] * split
            same(network, given[len(cuts) * split :], range(split, network.config.layers))
        else:
            assert set(given) == {None}
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_every_layer_of_every_token(
    network: Network, ids: list[int], expanding: Callable[[bool], list[WideKeys | None]]
) -> None:
    expanding(False)
    want = network.logits(ids[:150], replay=False)
    given = expanding(True)
    assert torch.equal(network.logits(ids[:150], replay=False), want)
    same(network, given, range(network.config.layers))
    modes = {plan.mode for plan in network.plan}
    assert modes == set(LayerMode)  # window alone, source, selecting, reusing


def test_several_sequences_in_a_chunk(
    network: Network, ids: list[int], expanding: Callable[[bool], list[WideKeys | None]]
) -> None:
    """Of other lengths, each from where it was: a sequence's entries are found under its number."""
    text = network.text
    assert text is not None
    results = []
    for answer in (False, True):
        memory = leftover_memory(network)
        expanding(False)
        seqs = [sequence(network, ids[7 * i : 7 * i + 120], slot=i, first_page=6 * i) for i in range(3)]
        for seq, upto in zip(seqs, (33, 90, 2), strict=True):
            network.prefill(memory, seq, upto)
        given = expanding(answer)
        spans = [(seq, seq.length, seq.length + more) for seq, more in zip(seqs, (1, 20, 60), strict=True)]
        step = Step(memory, network.config, spans)
        streams, pre = text.embed(step, None)
        streams, _ = text.run(streams, pre, step, range(network.config.decoder_start_layer))
        results.append((streams, memory.pages, memory.rings))
        if answer:
            same(network, given, range(network.config.decoder_start_layer))
            for keys, ratio in zip(given, network.config.compress_ratios, strict=False):
                assert keys is not None
                assert keys.window.shape == (3 * WINDOW + 81, network.config.head_dim)
                assert keys.entries is None or keys.entries.shape[:2] == (3, 110 // ratio)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_prefix_that_was_loaded(
    network: Network, ids: list[int], expanding: Callable[[bool], list[WideKeys | None]]
) -> None:
    """Its entries are in pages that this sequence never wrote: all that is visible is expanded."""
    results = []
    for answer in (False, True):
        memory = leftover_memory(network)
        expanding(False)
        donor = sequence(network, ids[: 3 * PAGE], slot=0, first_page=0)
        network.prefill(memory, donor, 3 * PAGE)
        seq = sequence(network, ids[:200], slot=1, first_page=10)
        seq.pages[:3] = donor.pages
        seq.length = seq.encoder_start = 3 * PAGE - WINDOW
        seq.write_from = 3 * PAGE
        expanding(answer)
        results.append((run(network, memory, seq, [130, 150]), memory.pages, memory.rings))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_steps_that_graphs_may_hold_expand_nothing(
    drafting: Network, ids: list[int], expanding: Callable[[bool], list[WideKeys | None]]
) -> None:
    memory = leftover_memory(drafting)
    seqs = [sequence(drafting, ids[: 40 + i], slot=i, first_page=8 * i) for i in range(2)]
    for seq in seqs:
        run(drafting, memory, seq, [39 + seq.slot])
    given = expanding(True)
    drafting.decode(memory, [seqs[0]])
    seqs[0].ids.append(7)
    proposals = drafting.propose(memory, seqs)
    drafting.verify(memory, seqs, proposals.chosen([3, 2])).commit([1, 1])
    assert len(given) > 2 * drafting.config.layers
    assert set(given) == {None}


def test_one_sources_entries_live_at_a_time_and_none_after_the_step(
    network: Network, memory: KVMemory, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's keys live as long as its layer."""
    attend = attention.sparse_attention
    entries: list[weakref.ref[torch.Tensor]] = []
    windows: list[weakref.ref[torch.Tensor]] = []

    def alive(held: list[weakref.ref[torch.Tensor]]) -> int:
        return len({id(tensor) for each in held if (tensor := each()) is not None})

    def seen(*args: Any, **more: Any) -> torch.Tensor:
        keys = args[11]
        windows.append(weakref.ref(keys.window))
        if keys.entries is not None:
            entries.append(weakref.ref(keys.entries))
        assert alive(windows) == 1
        assert alive(entries) <= 1
        return attend(*args, **more)

    gc.disable()
    try:
        monkeypatch.setattr(attention, "expands", lambda like, shape, **sizes: True)
        monkeypatch.setattr(attention, "sparse_attention", seen)
        seq = sequence(network, ids[:100])
        network.prefill(memory, seq, 70)
        assert entries
        assert alive(entries) == alive(windows) == 0
        run(network, memory, seq, [100])
        assert alive(entries) == alive(windows) == 0
        step, text = Step(memory, network.config, [(sequence(network, ids[:100]), 0, 70)]), network.text
        assert text is not None
        entries.clear()
        text.run(*text.embed(step, None), step, range(network.config.layers))
        assert entries
        assert alive(entries) == 0  # before the logits, though the step lives
    finally:
        gc.enable()


def test_entries_written_again_are_expanded_again(network: Network, memory: KVMemory, ids: list[int]) -> None:
    """A source that produces anew within a step leaves nothing of what was expanded before."""
    source = next(layer.attention for layer in network.text.layers if layer.attention.compressor is not None)
    assert source.pages is not None
    seq = sequence(network, ids[:64])
    step = Step(memory, network.config, [(seq, 0, 64)])
    planes, ratio = source.pages.planes, source.pages.ratio
    memory.pages.fill_(0)
    before = step.wide_entries(planes, ratio)
    assert step.wide_entries(planes, ratio) is before
    other = next(p for layer in network.text.layers if (p := layer.attention.pages) and p.planes != planes)
    assert step.wide_entries(other.planes, other.ratio) is not before
    source.compressor.produce(torch.randn(64, network.config.hidden_size).bfloat16(), step)
    after = step.wide_entries(planes, ratio)
    assert before.abs().max() == 0
    assert after.shape == (1, 64 // ratio, network.config.head_dim)
    assert wide_keys_ref.values(after).norm() > 1


def test_what_the_decision_is_told(
    network: Network, memory: KVMemory, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, int]] = []
    config = network.config

    def asked(like: torch.Tensor, shape: Shape, **sizes: int) -> bool:
        assert like is memory.pages
        assert shape == (config.heads, config.head_dim, config.window, config.rope_dim // 2)
        told.append(sizes)
        return False

    monkeypatch.setattr(attention, "expands", asked)
    seq = SequenceState(slot=0, pages=[9, 3, 4], ids=ids[:96])
    network.prefill(memory, seq, 30)
    told.clear()
    network.prefill(memory, seq, 91)
    readers = [plan.kv_source for plan in network.plan]
    for plan, sizes in zip(network.plan, told, strict=False):
        shared = plan.kv_source is not None
        assert sizes == {
            "rows": 61,
            "entries": 91 // plan.ratio if shared else 0,
            "layers": readers.count(plan.kv_source) if shared else 1,
        }
    assert len(told) == config.decoder_start_layer
