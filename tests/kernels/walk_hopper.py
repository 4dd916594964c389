"""Walks what the host does for a Hopper card, without one: ``python -m tests.kernels.walk_hopper``.

A layer of Flash's widths is advanced with tensors that say they are on a card. Every launch binds its
arguments as it would there (and, with ``--compile``, is compiled for sm_90); none runs, so results are
whatever memory held. A line of JSON for each case: the kernels launched, in order. In a process of its own,
for it changes torch.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from cedar.kernels import paging_ref
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

REUSE = 22  # a Reuse layer with another below it and one above
FULL = 20  # makes entries and index keys, and selects among them
LAUNCHED: list[str] = []
EARLY: list[bool] = []  # of each: whether it may begin before the one before has ended


class NoCard:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Bound:
    """A kernel that was not compiled: `cluster_hopper.launch` looks at its metadata and starts it."""

    packed_metadata = (4, 1, 0)
    metadata = SimpleNamespace(shared=0)
    asked = True

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: None


def pretend(compiles: bool) -> None:
    """From here on tensors are on a card, and launches bind."""
    driver.set_active(NoCard())
    run, compile_one = JITFunction.run, JITFunction._do_compile

    def launch(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        sizes = grid if isinstance(grid, tuple) else grid({})
        assert min(sizes) > 0, (self.__name__, sizes)
        assert all(size < 65_536 for size in sizes[1:]), (self.__name__, sizes)
        LAUNCHED.append(self.__name__)
        EARLY.append(bool(options.get("launch_pdl")))
        return run(self, *arguments, grid=grid, warmup=True, **options)

    def bind(self: Any, *arguments: Any) -> Any:
        kernel = compile_one(self, *arguments) if compiles else None
        assert kernel is not None or not compiles, self.__name__
        return Bound()

    CompiledKernel.__getitem__ = Bound.__getitem__
    JITFunction.run = launch
    JITFunction._do_compile = bind
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,misc]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    torch.empty = torch.zeros  # visible entries that nobody counted
    for name in ("zeros", "empty", "full", "arange"):
        setattr(torch, name, _here(getattr(torch, name)))
    torch.mm, torch.bmm = _library("mm", torch.mm), _library("bmm", torch.bmm)  # type: ignore[assignment]
    paging_ref.check_range = lambda *arguments: None  # what no kernel wrote is anything


def _here(make: Any) -> Any:
    def made(*arguments: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*arguments, **options)

    return made


def _library(name: str, product: Any) -> Any:
    """A product of the library's, which is a launch too."""

    def made(a: torch.Tensor, b: torch.Tensor, *, out_dtype: Any = None, out: Any = None) -> torch.Tensor:
        LAUNCHED.append(name)
        EARLY.append(False)
        shape = (*a.shape[:-1], b.shape[-1])
        return out if out is not None else torch.empty(shape, dtype=out_dtype or a.dtype)

    return made


def layer(which: int) -> tuple[Any, Any]:
    """Layer `which` of Flash's widths, of memory that nobody wrote, and a network for its states."""
    from cedar.model.dense import ExpansionBudget
    from cedar.model.network import Network
    from cedar.model.schedule import layer_plan, page_layout
    from cedar.model.tensors import TensorSpec, stage_tensors
    from cedar.model.weights import LayerBuilder
    from cedar.ops.bench.synthetic_network import FLASH, synthetic_config

    kinds = {"F8_E8M0": torch.uint8, "I8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    config, where = synthetic_config(FLASH), torch.device("cpu")
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in stage_tensors(config, "decode").items():
        if not name.startswith(f"layers.{which}."):
            continue
        if ".experts." in name:
            stem, _, part = name.rpartition(".experts.")
            number, _, kind = part.partition(".")
            if number == "0":
                spec = TensorSpec(f"{stem}.experts.{kind}", spec.dtype, (config.routed_experts, *spec.shape))
                tensors[spec.name] = torch.empty(spec.shape, dtype=kinds.get(spec.dtype, torch.bfloat16))
            continue
        tensors[name] = torch.empty(spec.shape, dtype=kinds.get(spec.dtype, torch.bfloat16))
    layout = page_layout(config, 256)
    builder = LayerBuilder(config, layout, tensors, where, ExpansionBudget(where, 0))
    net = Network(
        config=config, layout=layout, plan=layer_plan(config), device=where, stage="decode",
        fingerprint=bytes(32), text=None, vision=None,
    )  # fmt: skip
    return builder.layer(layer_plan(config)[which]), net


def prefill(of: Any, net: Any, tokens: int) -> None:
    """The second of two such layers in a chunk."""
    from cedar.model.residual import Residual
    from cedar.model.sources import Selection
    from cedar.model.step import Step

    memory, seq = net.own_sequence([0] * (512 + tokens))
    step = Step(memory, net.config, [(seq, 512, 512 + tokens)])
    streams = torch.empty(tokens, 4, net.config.hidden_size, dtype=torch.bfloat16)
    residual = Residual(streams, torch.empty(tokens, 4))
    selection = Selection(entries=torch.zeros(tokens, 512, dtype=torch.int32))
    _twice(of, residual, step, selection)
    assert (step._wide is not None) == ("attend_expanded" in LAUNCHED)


def prompts(of: Any, net: Any, sequences: int) -> None:
    """The first of two such layers in a chunk of eight tokens each of `sequences`, whose windows are full."""
    from cedar.model.residual import Residual
    from cedar.model.sources import Selection
    from cedar.model.state import SequenceState
    from cedar.model.step import Step

    memory = net.allocate(pages=sequences, slots=sequences)
    seqs = [SequenceState(slot=row, pages=[row], ids=[0] * 160) for row in range(sequences)]
    step = Step(memory, net.config, [(seq, 150, 158) for seq in seqs])
    tokens = 8 * sequences
    streams = torch.empty(tokens, 4, net.config.hidden_size, dtype=torch.bfloat16)
    LAUNCHED.clear()
    EARLY.clear()
    of.advance(
        Residual(streams, torch.empty(tokens, 4)), step,
        Selection(entries=torch.zeros(tokens, 512, dtype=torch.int32)), None,
    )  # fmt: skip


def decode(of: Any, net: Any, batch: int) -> None:
    """The same in a step of `batch` sequences."""
    from cedar.model.residual import Residual
    from cedar.model.sources import Selection

    step = _step(net, batch)
    residual = Residual(
        torch.empty(batch, 4, net.config.hidden_size, dtype=torch.bfloat16), torch.empty(batch, 4)
    )
    selection = Selection(entries=torch.zeros(batch, 512, dtype=torch.int32))
    _twice(of, residual, step, selection)


def select(of: Any, net: Any, batch: int) -> None:
    """A Full layer in a step of `batch` sequences."""
    from cedar.model.residual import Residual
    from cedar.model.sources import Selection

    step = _step(net, batch)
    residual = Residual(
        torch.zeros(batch, 4, net.config.hidden_size, dtype=torch.bfloat16), torch.zeros(batch, 4)
    )
    LAUNCHED.clear()
    EARLY.clear()
    of.advance(residual, step, Selection(), None)


def _step(net: Any, batch: int) -> Any:
    """One of `batch` sequences of 600 tokens."""
    from cedar.model.decode_step import DecodeStep
    from cedar.model.state import SequenceState

    memory = net.allocate(pages=3 * batch, slots=batch)
    seqs = [
        SequenceState(slot=row, pages=list(range(3 * row, 3 * row + 3)), ids=[0] * 700)
        for row in range(batch)
    ]
    for seq in seqs:
        seq.length = 600
    return DecodeStep.of(memory, net.config, seqs)


def _twice(of: Any, residual: Any, step: Any, selection: Any) -> None:
    of.advance(residual, step, selection, None)
    LAUNCHED.clear()
    EARLY.clear()
    of.advance(residual, step, selection, None)


def main() -> None:
    """Every case."""
    of, net = layer(REUSE)
    full = layer(FULL)[0]
    pretend("--compile" in sys.argv)
    cases = [(decode, of, n) for n in (1, 3, 8, 12, 16, 40, 64, 65, 80, 100, 128)]
    cases += [(prefill, of, n) for n in (128, 200, 300, 512, 1000, 4096)]
    cases += [(prompts, of, 600)]
    cases += [(select, full, n) for n in (1, 3, 16)]
    for walk, one, size in cases:
        walk(one, net, size)
        line = {"case": walk.__name__, "size": size, "launched": LAUNCHED, "early": EARLY}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
