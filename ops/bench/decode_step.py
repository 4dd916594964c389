# mypy: allow-untyped-calls
"""What a decode step costs beside its weights: ``python -m cedar.ops.bench.decode_step``.

Forty layers with Flash's schedule and tiny weights, replayed as a CUDA graph for several batch sizes, beside
the host's part of a step, the same step launched eagerly, and as many empty launches in a graph.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from cedar.model.decode_step import DecodeStep
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState
from cedar.ops.bench.synthetic_network import NARROW, TINY, synthetic_network

CONTEXT = 300
BATCHES = (1, 16, 64)


def started(net: Network, batch: int) -> tuple[KVMemory, list[SequenceState]]:
    """`batch` sequences of the same `CONTEXT` tokens and different ones after them, decoded far enough that
    their rung is captured.
    """
    pages = -(-(CONTEXT + 8) // net.layout.page_tokens)
    memory = net.allocate(pages=pages * batch, slots=batch)
    seqs = []
    for row in range(batch):
        ids = [(i * 37) % net.config.vocab_size for i in range(CONTEXT)]
        ids += [(i * 53 + row * 101) % net.config.vocab_size for i in range(8)]
        seqs.append(SequenceState(slot=row, pages=list(range(pages * row, pages * row + pages)), ids=ids))
    net.prefill(memory, seqs[0], CONTEXT)
    net.finish_prefill(memory, seqs[0])
    for row, seq in enumerate(seqs[1:], 1):
        memory.rings[row], memory.tails[row] = memory.rings[0], memory.tails[0]
        memory.pages[pages * row : pages * (row + 1)] = memory.pages[:pages]
        seq.length, seq.decoder_start = seqs[0].length, seqs[0].decoder_start
    for _ in range(3):
        net.decode(memory, seqs)
    return memory, seqs


def replay_time_ms(net: Network, batch: int, replays: int = 20) -> float:
    """Median time of one replay on the device."""
    memory, _ = started(net, batch)
    (rung,) = net._graphs_on(memory)._rungs.values()
    graph = rung.step.graph
    assert graph is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / replays)
    return float(statistics.median(times))


def host_time_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Median wall time of a call and what it waits for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    """Prints one line for each batch size; 0, also where there is nothing to run on."""
    argparse.ArgumentParser(prog="python -m cedar.ops.bench.decode_step", description=__doc__).parse_args(
        argv
    )
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to time")
        return 0
    print("| weights | batch | replay ms | inputs ms | whole call ms | eager ms |")
    print("|---|---|---|---|---|---|")
    for name, widths in (("tiny", TINY), ("narrow, 64 heads of 512", NARROW)):
        net = synthetic_network(widths, "cuda")
        assert net.text is not None
        for batch in BATCHES:
            replay = replay_time_ms(net, batch)
            memory, seqs = started(net, batch)
            (rung,) = net._graphs_on(memory)._rungs.values()
            inputs = host_time_ms(partial(rung.fill, seqs))
            row = (
                replay,
                inputs,
                host_time_ms(partial(_call, net, memory, seqs)),
                host_time_ms(partial(_eager, net, memory, seqs), 3),
            )
            print(f"| {name} | {batch} | " + " | ".join(f"{value:.3f}" for value in row) + " |", flush=True)
    return 0


def _call(net: Network, memory: KVMemory, seqs: list[SequenceState]) -> None:
    """One decode step, taken back."""
    net.decode(memory, seqs)
    for seq in seqs:
        seq.length -= 1


def _eager(net: Network, memory: KVMemory, seqs: list[SequenceState]) -> None:
    assert net.text is not None
    step = DecodeStep.of(memory, net.config, seqs)
    streams, pre = net.text.embed(step, None)
    net.text.logits(*net.text.run(streams, pre, step, range(net.config.layers)))


if __name__ == "__main__":
    sys.exit(main())
