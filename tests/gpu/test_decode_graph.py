"""The decode step as CUDA graphs: what is replayed is what would have run, cheaply and in few launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import pytest
import torch
from cedar.model.block import Layer
from cedar.model.captured import Captured, GraphPool
from cedar.model.decode_step import DecodeStep
from cedar.model.network import Network
from cedar.model.residual import Residual
from cedar.model.sources import Selection
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step
from cedar.ops.bench.decode_step import replay_time_ms
from cedar.ops.bench.synthetic_network import FLASH, NARROW, TINY, synthetic_layer, synthetic_network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Launches of a Reuse layer: docs/performance.md has them one by one.
MOST_DECODE = {1: 11, 8: 11, 64: 11, 100: 11, 128: 11}  # by batch
# By tokens of the chunk, at Flash's own widths, as a library's product may be two launches. A network's chunk
# is 512 unless it is told otherwise; beyond 1,024 (the clusters' presets have 8,192) kernels are 4,096's.
MOST_PREFILL = {512: 15, 1024: 15, 4096: 15}
MOST_REPLAY_MS = 1.2  # forty layers, batch 1, tiny weights: 1.11 measured
REUSE = 22  # a Reuse layer with another below it and one above
CHUNK = 64  # a prefill's kernels are then those of a decode step of as many sequences: compiled once


@cache
def network() -> Network:
    return synthetic_network(NARROW, "cuda")


def prefilled(net: Network, lengths: list[int]) -> tuple[KVMemory, list[SequenceState]]:
    """Sequences that have run `lengths` tokens, multiples of `CHUNK`, 16 pages for each, and have more
    ids.
    """
    memory = net.allocate(pages=16 * len(lengths), slots=len(lengths) + 1)
    seqs = []
    for row, length in enumerate(lengths):
        ids = [(i * 37 + row * 101) % 1000 for i in range(length + 40)]
        seq = SequenceState(slot=row + 1, pages=list(range(16 * row, 16 * row + 16)), ids=ids)
        while seq.length < length:
            net.prefill(memory, seq, seq.length + CHUNK)
        net.finish_prefill(memory, seq)
        seqs.append(seq)
    return memory, seqs


def eager(net: Network, memory: KVMemory, seqs: list[SequenceState]) -> torch.Tensor:
    """The same step, launched one kernel at a time; no length changes."""
    assert net.text is not None
    step = DecodeStep.of(memory, net.config, seqs)
    streams, pre = net.text.embed(step, None)
    return net.text.logits(*net.text.run(streams, pre, step, range(net.config.layers)))


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_a_replay_is_the_step(batch: int) -> None:
    """On the first use of a rung (eager), the second (captured) and later; groups close on every other
    token.
    """
    net = network()
    memory, seqs = prefilled(net, [256, 128, *[64] * 30][:batch])
    for number, seq in enumerate(seqs[3:]):  # at other places of their groups
        for _ in range(number % 3):
            net.decode(memory, [seq])
    for _ in range(5):
        want = eager(net, memory, seqs)
        rings, pages = memory.rings.clone(), memory.pages.clone()
        got = net.decode(memory, seqs)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert torch.equal(memory.rings, rings)  # writing again what was written changes nothing
        assert torch.equal(memory.pages, pages)


def test_rungs_share_what_they_read() -> None:
    """A sequence alone, then in a batch, then alone again goes on as if it had always been alone."""
    net = network()
    (first, (alone, *_)), (second, others) = prefilled(net, [192, 128, 64]), prefilled(net, [192, 128, 64])
    for together in (False, True, True, False, False, True):
        want = net.decode(first, [alone])
        got = net.decode(second, others if together else others[:1])
        torch.testing.assert_close(got[:1], want, rtol=5e-2, atol=5e-2)


def test_a_longer_context_takes_a_wider_rung() -> None:
    net = network()
    first = 16 * net.layout.page_tokens
    memory = net.allocate(pages=40, slots=1)
    ids = [(i * 31) % 1000 for i in range(first + 8)]
    seq = SequenceState(slot=0, pages=list(range(20)), ids=ids)
    while seq.length < first - 512:
        net.prefill(memory, seq, seq.length + 512)
    while seq.length < first - CHUNK:
        net.prefill(memory, seq, seq.length + CHUNK)
    net.finish_prefill(memory, seq)
    while seq.length < first - 2:
        net.decode(memory, [seq])
    for _ in range(5):
        want = eager(net, memory, [seq])
        torch.testing.assert_close(net.decode(memory, [seq]), want, rtol=1e-3, atol=1e-3)
    assert len(net._graphs_on(memory)._rungs) == 2


def test_rungs_can_be_made_ready_without_touching_a_sequence() -> None:
    net = network()
    memory, seqs = prefilled(net, [128, 64])
    rings, pages, tails = memory.rings.clone(), memory.pages.clone(), memory.tails.clone()
    for batch, tokens in net.decode_ladder(memory, 2, 300):
        net.prepare_decode(memory, batch, tokens)
    rungs = net._graphs_on(memory)._rungs
    assert len(rungs) == 2
    assert all(rung.step.graph is not None for rung in rungs.values())
    for now, before in ((memory.rings, rings), (memory.pages, pages), (memory.tails, tails)):
        assert torch.equal(now, before)
    want = eager(net, memory, seqs)
    torch.testing.assert_close(net.decode(memory, seqs), want, rtol=1e-3, atol=1e-3)
    assert len(rungs) == 2


def launches(run: Callable[[], object]) -> list[str]:
    """The CUDA kernels and copies that a call launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.key_averages()
    kinds = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(name for e in kinds for name in [e.key] * e.count if "Activity" not in name)


def reuse_layer(step: Step, below: Layer, layer: Layer, tokens: int) -> Callable[[], object]:
    """One Reuse layer in the middle of a stack: the layer below leaves its output to it, as it does
    above.
    """
    width = layer.attn_norm.shape[0]
    streams = torch.randn(tokens, 4, width, device="cuda").to(torch.bfloat16)
    residual = Residual(streams, torch.rand(tokens, 4, device="cuda"))
    selection = Selection(entries=torch.zeros(tokens, 512, dtype=torch.int32, device="cuda"))
    for each in (below, layer):
        each.advance(residual, step, selection, None)
    return lambda: layer.advance(residual, step, selection, None)


@pytest.mark.parametrize("batch", MOST_DECODE)
def test_launches_of_a_reuse_layer_in_decode(batch: int) -> None:
    net = network()
    assert net.text is not None
    memory = net.allocate(pages=batch, slots=batch)
    seqs = [SequenceState(slot=row, pages=[row], ids=[7] * 21, length=20) for row in range(batch)]
    layers = net.text.layers[REUSE - 1 : REUSE + 1]
    run = reuse_layer(DecodeStep.of(memory, net.config, seqs), *layers, batch)
    run()
    names = launches(run)
    print(len(names), *names, sep="\n")
    assert len(names) <= MOST_DECODE[batch], names


@cache
def flash_layer() -> tuple[Layer, Network]:
    return synthetic_layer(FLASH, REUSE, "cuda")


@pytest.mark.parametrize("tokens", MOST_PREFILL)
def test_launches_of_a_reuse_layer_in_prefill(tokens: int) -> None:
    layer, net = flash_layer()
    memory, seq = net.own_sequence([i % 1000 for i in range(512 + tokens)])
    run = reuse_layer(Step(memory, net.config, [(seq, 512, 512 + tokens)]), layer, layer, tokens)
    run()
    names = launches(run)
    print(len(names), *names, sep="\n")
    assert len(names) <= MOST_PREFILL[tokens], names


def test_forty_layers_replay_in_time() -> None:
    net = synthetic_network(TINY, "cuda")
    times = [replay_time_ms(net, batch=1) for _ in range(3)]
    assert statistics.median(times) < MOST_REPLAY_MS, times


def test_a_graph_that_is_garbage_while_another_is_captured() -> None:
    """Only the cyclic collector would free it, in the middle of the capture, which CUDA would then refuse."""
    x = torch.ones(8, device="cuda")
    old = Captured(lambda: x + 1, GraphPool())

    def many_objects() -> torch.Tensor:
        assert len([[number] for number in range(200_000)]) == 200_000
        return x + 2

    new = Captured(many_objects, GraphPool())
    for _ in range(2):
        old()
    new()
    circle: list[object] = [old]
    circle.append(circle)
    del old, circle
    assert new().tolist() == [3.0] * 8
    assert new.graph is not None
