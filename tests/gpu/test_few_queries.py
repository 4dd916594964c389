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
        (64, 512, 6, 512, 128, 32, torch.int32),
        (64, 512, 5, 500, 100, 64, torch.int64),
        (64, 512, 8, 70, 1, 30, torch.int32),
        (64, 512, 12, 512, 37, 0, torch.int64),
        (20, 512, 7, 33, 128, 4, torch.int32),
        (64, 512, 16, 0, 37, 32, torch.int32),
        (20, 128, 5, 1000, 37, 8, torch.int64),
        (8, 128, 40, 33, 1, 0, torch.int32),
    ],
)
def test_awkward_shapes(
    heads: int, width: int, tokens: int, count: int, rows: int, half_rope: int, index: torch.dtype
) -> None:
    """The output is rounded once, the reference's before the inverse RoPE too. The last query has no key."""
    from cedar.kernels.sparse_attention_triton import sparse_attention

    args = arguments(heads, width, tokens, count, rows, half_rope, index)
    if tokens > 1:
        for part in (args[6], args[8]):
            if part is not None:
                part[-1] = -1
    want = reference(args)
    call = args[0], args[1], args[2:4], *args[4:]
    got = sparse_attention(*call, few=True)
    assert (got.double() - want.double()).norm() <= 3e-3 * want.double().norm()
    assert tokens == 1 or not got[-1].any()
    for i in range(20):
        assert torch.equal(sparse_attention(*call, few=True, settled=i % 2 == 1), got)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 3, 6, 13])
def test_any_numbers_read_nothing_outside(tokens: int, index: torch.dtype) -> None:
    from cedar.kernels.sparse_attention_triton import sparse_attention

    args = list(arguments(64, 512, tokens, 512, 128, 32, index))
    for i, kind in ((4, index), (5, index), (6, torch.int32), (8, index)):
        low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
        args[i] = torch.randint(low, high, args[i].shape, dtype=torch.int64, device="cuda").to(kind)
    assert sparse_attention(args[0], args[1], args[2:4], *args[4:], few=True).isfinite().all()


def test_programs_meet_in_every_replay() -> None:
    """Parts are complete when they are joined: outputs poisoned before each replay come out the same; the
    counters and the memory of parts stand where a launch may begin.
    """
    from cedar.kernels.grid_hopper import counters
    from cedar.kernels.sparse_attention import sparse_attention
    from cedar.kernels.sparse_attention_until_hopper import parts

    calls = [arguments(64, 512, n, 512, 128, 32, torch.int32) for n in (1, 2, 4, 6, 12)]
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
    assert all((part.view(torch.int32) == -1).all() for part in parts(0))


def test_numbers_that_are_none_do_not_stop_the_join() -> None:
    """A query with a NaN gives NaN; the others, and the next launch, are what they were."""
    from cedar.kernels.sparse_attention import sparse_attention

    args = arguments(64, 512, 6, 512, 128, 32, torch.int32)
    want = sparse_attention(*args)
    broken = args[0].clone()
    broken[2] = torch.nan
    got = sparse_attention(broken, *args[1:])
    assert got[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(got[rest], want[rest])
    assert torch.equal(sparse_attention(*args), want)
