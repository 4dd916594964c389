"""Attention of few queries: awkward shapes, and programs that wait for each other, over and over."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import rope_ref, sparse_attention_ref
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.paging import Plane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = 16  # entries a page


def arguments(
    heads: int, width: int, tokens: int, count: int, rows: int, half_rope: int, index: torch.dtype
) -> tuple[object, ...]:
    """Of the public function, on the GPU: `count` entries and `rows` window rows a query, some absent."""
    torch.manual_seed(heads + tokens)
    planes = Plane(0, width // 2, ROWS), Plane(ROWS * width // 2, width // 16, ROWS)
    pages = torch.randint(0, 256, (40, ROWS * (width // 2 + width // 16)), dtype=torch.uint8)
    pages[:, planes[1].offset :] = torch.randint(0x28, 0x40, (40, ROWS * width // 16), dtype=torch.uint8)
    entries = torch.randint(-1, 20 * ROWS, (tokens, count), dtype=torch.int32)
    window = pack_window_rows(torch.randn(150, width).bfloat16())
    angles = torch.rand(tokens, max(half_rope, 1)) * 6
    keys = (
        pages.cuda(), *planes, torch.randperm(40).view(2, 20).to(index).cuda(),
        torch.randint(0, 2, (tokens,), dtype=index).cuda(), entries.cuda(),
    )  # fmt: skip
    return (
        torch.randn(tokens, heads, width).bfloat16().cuda(), *(keys if count else (None,) * 6), window.cuda(),
        torch.randint(-1, 150, (tokens, rows), dtype=index).cuda(), torch.randn(heads).cuda(),
        (angles.cos().cuda(), angles.sin().cuda()) if half_rope else None,
    )  # fmt: skip


def reference(args: tuple[object, ...]) -> torch.Tensor:
    q, pages, payload, scales, table, seq, entries, window, rows, sink, rope = args
    turned = rope_ref.turn(q, *rope) if rope else q
    out = sparse_attention_ref.sparse_attention(
        turned, pages, (payload, scales), table, seq, entries, window, rows, sink
    )
    return rope_ref.turn(out, rope[0], -rope[1]) if rope else out


@pytest.mark.parametrize(
    ("heads", "width", "tokens", "count", "rows", "half_rope", "index"),
    [
        (64, 512, 1, 512, 128, 32, torch.int32),
        (64, 512, 4, 70, 37, 32, torch.int64),
        (33, 512, 2, 100, 0, 256, torch.int32),
        (64, 512, 3, 0, 128, 32, torch.int64),
        (20, 128, 5, 1000, 37, 8, torch.int64),
        (8, 128, 40, 33, 1, 0, torch.int32),
    ],
)
def test_awkward_shapes(
    heads: int, width: int, tokens: int, count: int, rows: int, half_rope: int, index: torch.dtype
) -> None:
    """The output is rounded once, the reference's before the inverse RoPE too."""
    from cedar.kernels.sparse_attention import sparse_attention

    args = arguments(heads, width, tokens, count, rows, half_rope, index)
    want = reference(args)
    got = sparse_attention(*args)
    assert (got.double() - want.double()).norm() <= 3e-3 * want.double().norm()
    for _ in range(5):
        assert torch.equal(sparse_attention(*args), got)


def test_programs_meet_in_every_replay() -> None:
    """Parts are complete when they are joined: outputs poisoned before each replay come out the same; the
    counters stand where a launch may begin.
    """
    from cedar.kernels.grid_hopper import counters
    from cedar.kernels.sparse_attention import sparse_attention

    calls = [arguments(64, 512, n, 512, 128, 32, torch.int32) for n in (1, 2, 4)]
    calls.append(arguments(8, 128, 3, 300, 128, 32, torch.int32))
    want = [sparse_attention(*args) for args in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [sparse_attention(*args) for _ in range(5) for args in calls]
    for _ in range(100):
        for out in got:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, want[i % len(calls)]) for i, out in enumerate(got))
    assert not (counters(0) % 64).any()
