"""Keys expanded once for a chunk, on a CUDA device: bit for bit the reference's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.latents import Staging, norm_latents
from cedar.kernels.paging import Plane
from cedar.kernels.wide_keys import Shape, attends_wide, expand_entries
from cedar.kernels.wide_keys_ref import expand_window
from cedar.model import attention
from cedar.model.dense import Rows
from cedar.model.network import Network
from cedar.model.schedule import LayerMode
from cedar.model.sources import Selection
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step
from cedar.ops.bench.synthetic_network import NARROW, synthetic_network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def attends() -> None:
    """Skips where the device has no kernel for wide keys."""
    if not attends_wide(torch.empty(0, device="cuda"), Shape(64, 512, 128, 32)):
        pytest.skip("no kernel for wide keys on this device")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize(
    ("width", "lines", "sequences", "count", "index"),
    [
        (512, 128, 1, 65_536, torch.int32),
        (512, 256, 3, 1_001, torch.int64),
        (512, 128, 1, 1, torch.int32),
        (64, 16, 5, 333, torch.int32),
        (96, 16, 2, 50, torch.int32),  # no power of two: the reference's operations
    ],
)
def test_entries(width: int, lines: int, sequences: int, count: int, index: torch.dtype) -> None:
    """Of planes that lie among others, pages in any order, some of them outside of memory."""
    g = torch.Generator().manual_seed(count)
    planes = Plane(512, width // 2, lines), Plane(512 + lines * width // 2, width // 16, lines)
    end = planes[1].offset + lines * width // 16
    pages = torch.randint(0, 256, (67, end + 64), dtype=torch.uint8, generator=g)
    pages[:, planes[1].offset : end] = torch.randint(
        0, 0x7F, (67, end - planes[1].offset), dtype=torch.uint8, generator=g
    )
    columns = -(-count // lines) + 1
    table = torch.randint(-9, 67 + 9, (sequences, columns), generator=g, dtype=index)
    table[0, 0] = torch.iinfo(torch.int32).max
    want = expand_entries(pages, *planes, table, count)
    got = expand_entries(pages.cuda(), *planes, table.cuda(), count)
    assert torch.equal(bits(got.cpu()), bits(want))


@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_window_keys(spread: float) -> None:
    """A chunk of two sequences with rings of eight rows: own keys and what the rings held, of magnitudes that
    fp16 holds and of others.
    """
    g = torch.Generator().manual_seed(int(spread))
    tokens, queries, keys, window = 21, 128, 512, 8
    latents = torch.randn(tokens, queries + keys, generator=g)
    latents[:, queries:] *= torch.exp2(torch.randn(keys, generator=g) * spread)
    latents = latents.bfloat16()
    weights = (
        torch.rand(queries, generator=g).bfloat16(),
        torch.exp2(torch.randn(keys, generator=g) * spread).bfloat16(),
    )
    angles = torch.rand(tokens, 32, generator=g) * 6
    rings = pack_window_rows((torch.randn(40, keys, generator=g) * spread).bfloat16())
    rings[3] = torch.randint(0, 256, (keys + keys // 32,), dtype=torch.uint8, generator=g)
    sources = torch.arange(16) + 2
    targets, saved = torch.full((tokens,), -1), torch.arange(tokens) % 16
    targets[[2, 5]], saved[[2, 5]] = torch.tensor([20, 21]), torch.tensor([3, 9])
    sources[[3, 9]] = -1
    moves = (sources, targets, saved)
    places = torch.arange(2 * window, 2 * window + tokens)
    both = []
    for device in ("cpu", "cuda"):
        buffer = torch.full((2 * window + tokens, keys + keys // 32), 9, dtype=torch.uint8, device=device)
        wide = torch.full((buffer.shape[0], keys), 7.0, dtype=torch.float16, device=device)
        staging = Staging(rings.clone().to(device), *(part.to(device) for part in moves))
        given = (part.to(device) for part in (latents, *weights))
        rope = (angles.cos().to(device), angles.sin().to(device))
        norm_latents(*given, rope, 1e-20, buffer, places.to(device), (), staging, wide)
        both.append((buffer.cpu(), wide.cpu()))
    (buffer, wide), (found, got) = both
    assert torch.equal(found, buffer)
    assert torch.equal(bits(got), bits(wide))
    assert torch.equal(bits(wide), bits(expand_window(buffer, keys)))


@cache
def network() -> Network:
    return synthetic_network(NARROW, "cuda")


def filled(net: Network, lengths: list[int]) -> tuple[KVMemory, list[SequenceState]]:
    """Sequences of `lengths` tokens with random keys behind them, and ids for 700 more."""
    memory = net.allocate(pages=8 * len(lengths), slots=len(lengths))
    memory.pages.view(torch.int64).random_()
    for source in net.layout.sources:
        _, scales, _, index_scales = source.planes
        for plane, low, high in ((scales, 0x28, 0x40), (index_scales, 124, 130)):
            part = memory.pages[:, plane.offset : plane.offset + plane.row_bytes * plane.rows]
            part.copy_(torch.randint(low, high, part.shape, dtype=torch.uint8))
    keys = torch.randn(memory.rings.shape[:3].numel(), net.config.head_dim, device="cuda")
    memory.rings.copy_(pack_window_rows(keys.bfloat16()).view(memory.rings.shape))
    seqs = []
    for row, length in enumerate(lengths):
        pages = list(range(8 * row, 8 * row + 8))[::-1]
        seqs.append(SequenceState(slot=row, pages=pages, ids=[7] * (length + 700), length=length))
    return memory, seqs


@pytest.mark.usefixtures("attends")
@pytest.mark.parametrize("lengths", [[900], [500, 30, 7]])
def test_each_layer_of_a_chunk(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of every kind of layer gives on wide keys what it gives on packed ones, from the same state
    and rows; both leave the same rings.
    """
    net = network()
    assert net.text is not None
    memory, seqs = filled(net, lengths)
    g = torch.Generator().manual_seed(len(lengths))
    expands, took = attention.expands, []
    steps = {}
    for answer in (True, False):
        spans = [(seq, seq.length, seq.length + 640 // len(seqs)) for seq in seqs]
        steps[answer] = Step(memory, net.config, spans)
    selections = {answer: Selection() for answer in steps}
    rows = steps[True].rows
    for plan, layer in zip(net.plan[:27], net.text.layers, strict=False):
        x = Rows(torch.randn(rows, net.config.hidden_size, generator=g).bfloat16().cuda())
        rings, tails = memory.rings.clone(), memory.tails.clone()
        found = {}
        for answer, step in steps.items():
            memory.rings.copy_(rings)
            memory.tails.copy_(tails)

            def asked(like: torch.Tensor, shape: Shape, answer: bool = answer, **sizes: int) -> bool:
                yes = answer and expands(like, shape, **sizes)
                took.append(yes)
                return yes

            monkeypatch.setattr(attention, "expands", asked)
            found[answer] = layer.attention(x, step, selections[answer], produce=True), memory.rings.clone()
        assert torch.equal(found[True][1], found[False][1])
        got, want = found[True][0].double(), found[False][0].double()
        assert float((got - want).norm() / want.norm()) < 2e-2, plan
    assert took == [True, False] * 27
    assert {plan.mode for plan in net.plan[:27]} == set(LayerMode)


@pytest.mark.usefixtures("attends")
def test_a_prompt_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that expand and chunks that do not give what none of them expanding gives, within what rounding
    does to a network of random weights; what was expanded is gone with the step.
    """
    net, logits, expands = network(), [], attention.expands
    for answer in (True, True, False):  # what is allocated once for all is by then
        took: list[bool] = []

        def asked(
            like: torch.Tensor, shape: Shape, answer: bool = answer, took: list[bool] = took, **sizes: int
        ) -> bool:
            took.append(answer and expands(like, shape, **sizes))
            return took[-1]

        monkeypatch.setattr(attention, "expands", asked)
        memory, seq = net.own_sequence([(i * 31) % 1000 for i in range(1400)])
        before = torch.cuda.memory_allocated()
        for upto in (600, 900, 1400):
            net.prefill(memory, seq, upto)
        logits.append(net.finish_prefill(memory, seq).double())
        assert any(took) == answer
        left = torch.cuda.memory_allocated() - before
        assert len(logits) == 1 or left < 1 << 20
    assert torch.equal(logits[0], logits[1])
    assert float((logits[1] - logits[2]).norm() / logits[2].norm()) < 0.2
