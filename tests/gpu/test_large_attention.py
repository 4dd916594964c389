"""Attention for 64 heads of 512: awkward keys, counts and layouts, by any number of programs a query."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels import fp4_ref, fp8_ref, paging_ref
from cedar.kernels.paging import Plane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQUENCES, WIDTH, PAGES, NEAR = 3, 20, 64, 300


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x float64 [N, H, D] with its last channels, two a pair, turned by cos and sin [N, R / 2]."""
    first = x.shape[2] - 2 * cos.shape[1]
    even, odd = x[..., first::2], x[..., first + 1 :: 2]
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat(
        (x[..., :first], torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)), -1
    )


def truth(args: tuple[object, ...]) -> torch.Tensor:
    """float64 [N, 64, 512] of arguments of `sparse_attention_triton.sparse_attention`."""
    q, pages, planes, table, seq, entries, window, rows, sink, rope = args
    turned = turn(q.double(), *rope).bfloat16().double() if rope else q.double()
    keys = fp8_ref.unpack_rows(window[rows.clamp_min(0).long()], 512).double()
    present = rows >= 0
    if entries.shape[1]:
        packed = paging_ref.gather(pages, planes, table, seq.int(), entries.clamp_min(0))
        keys = torch.cat((keys, fp4_ref.unpack_e4m3(*packed).double()), 1)
        present = torch.cat((present, entries >= 0), 1)
    logits = (turned @ keys.transpose(1, 2) * 512**-0.5).masked_fill(~present[:, None], -torch.inf)
    logits = torch.cat((logits, sink.double()[None, :, None].expand(len(q), -1, -1)), 2)
    out = torch.softmax(logits, 2)[..., :-1] @ keys
    return turn(out, rope[0], -rope[1]) if rope else out


def arguments(
    tokens: int,
    count: int,
    rows: int,
    half_rope: int,
    layout: tuple[int, int],
    index: torch.dtype,
    absent: str,
) -> tuple[object, ...]:
    """`count` entries and `rows` window rows a query on the GPU; `layout`: entries a page, bytes between its
    parts; `absent`: which keys are.
    """
    torch.manual_seed(tokens + count)
    per_page, gap = layout
    payload = Plane(gap, 256, per_page)
    scales = Plane(2 * gap + 256 * per_page, 32, per_page)
    pages = torch.randint(0, 256, (PAGES, scales.offset + 32 * per_page + gap), dtype=torch.uint8)
    pages[:, scales.offset : scales.offset + 32 * per_page] = torch.randint(
        0x28, 0x40, (PAGES, 32 * per_page), dtype=torch.uint8
    )
    table = torch.randperm(PAGES)[: SEQUENCES * WIDTH].view(SEQUENCES, WIDTH).to(index)
    entries = torch.randint(0, per_page * WIDTH, (tokens, count), dtype=torch.int32)
    near = torch.randint(0, NEAR, (tokens, rows), dtype=index)
    if absent == "some":
        entries[torch.rand(tokens, count) < 0.3] = -1
        near[torch.rand(tokens, rows) < 0.3] = -1
    elif absent == "last":
        entries[1::2, count // 3 :] = -1
        entries[::3] = -1
    elif absent == "entries":
        entries[:] = -1
        near[::2] = -1  # some queries have no key at all
    elif absent == "rows":
        near[:] = -1
    window = fp8_ref.pack_rows(torch.randn(NEAR, 512).bfloat16() * torch.randn(NEAR, 1).exp())
    angles = torch.rand(tokens, max(half_rope, 1)) * 6
    return (
        (torch.randn(tokens, 64, 512) * 0.7).bfloat16().cuda(), pages.cuda(), (payload, scales), table.cuda(),
        torch.randint(0, SEQUENCES, (tokens,), dtype=index).cuda(), entries.cuda(), window.cuda(),
        near.cuda(), torch.randn(64).cuda(),
        (angles.cos().cuda(), angles.sin().cuda()) if half_rope else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "count", "rows", "half_rope", "layout", "index", "absent", "splits"),
    [
        (7, 512, 128, 32, (256, 0), torch.int32, "some", (1, 2, 3, 4, 5, 7, 9, 11)),
        (5, 500, 100, 32, (16, 4), torch.int64, "some", (1, 2, 4, 9)),  # not aligned to 16 bytes
        (5, 70, 128, 0, (16, 4), torch.int64, "last", (1, 2, 3)),
        (6, 512, 128, 32, (256, 0), torch.int32, "last", (1, 2, 4, 9)),
        (4, 512, 37, 64, (16, 16), torch.int32, "entries", (1, 2, 9)),
        (4, 512, 1, 256, (12, 4), torch.int32, "rows", (1, 3)),
        (5, 0, 128, 32, (16, 0), torch.int32, "some", (1,)),
        (5, 33, 1, 16, (1, 0), torch.int32, "some", (1, 2)),
        (300, 300, 128, 32, (256, 0), torch.int32, "last", (1,)),
        (200, 130, 64, 0, (16, 0), torch.int32, "some", (1, 2)),
    ],
)
def test_awkward_keys_in_any_split(
    tokens: int, count: int, rows: int, half_rope: int, layout: tuple[int, int], index: torch.dtype,
    absent: str, splits: tuple[int, ...],
) -> None:  # fmt: skip
    """Twenty times the same bits; queries without a key give zeros."""
    from cedar.kernels.sparse_attention_triton import sparse_attention

    args = arguments(tokens, count, rows, half_rope, layout, index, absent)
    want = truth(args)
    lonely = ~torch.cat((args[5] >= 0, args[7] >= 0), 1).any(1)
    for parts in splits:
        got = sparse_attention(*args, splits=parts, few=False)
        assert (got.double() - want).norm() <= 2.4e-3 * want.norm(), parts
        assert not got[lonely].any(), parts
        for i in range(20):
            again = sparse_attention(*args, splits=parts, few=False, settled=i % 2 == 1)
            assert torch.equal(again, got), parts


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("splits", [1, 2, 9])
def test_any_numbers_read_nothing_outside(splits: int, index: torch.dtype) -> None:
    from cedar.kernels.sparse_attention_triton import sparse_attention

    args = list(arguments(9, 512, 128, 32, (256, 0), index, "none"))
    for i, kind in ((3, index), (4, index), (5, torch.int32), (7, index)):
        low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
        args[i] = torch.randint(low, high, args[i].shape, dtype=torch.int64, device="cuda").to(kind)
    out = sparse_attention(*args, splits=splits, few=False)
    assert out.isfinite().all()


def test_scores_that_rise_from_tile_to_tile() -> None:
    """Every tile's greatest score is far beyond the last one's, or far below, and sums are still right."""
    from cedar.kernels.sparse_attention_triton import sparse_attention

    for order in (1, -1):
        args = list(arguments(6, 512, 128, 32, (256, 0), torch.int32, "none"))
        entries = args[5]
        pages, scales = args[1], args[2][1]
        scale = pages[:, scales.offset : scales.offset + 32 * 256].view(PAGES, 256, 32)
        scale.copy_(
            (0x20 + torch.arange(256, device="cuda") // 10)[None, :, None].to(torch.uint8).expand_as(scale)
        )
        args[5] = entries.gather(1, (order * (entries % 256)).argsort(1)).contiguous()
        args[0] = args[0] * 8
        want = truth(tuple(args))
        for parts in (1, 2):
            got = sparse_attention(*args, splits=parts, few=False)
            assert (got.double() - want).norm() <= 2.4e-3 * want.norm()


@pytest.mark.parametrize("tokens", [1, 6, 7, 16, 48, 64, 100, 128, 384])
def test_rows_of_the_launch_before_the_queries_are_seen(tokens: int) -> None:
    """`settled` in a captured chain of window row, queries, attention: each step reads its own new row."""
    from cedar.kernels.latents import norm_latents
    from cedar.kernels.linear import linear_fp8, order_for, settles
    from cedar.kernels.sparse_attention import sparse_attention

    torch.manual_seed(tokens)
    steps, width = 24, 1280
    args = arguments(tokens, 512, 128, 32, (256, 0), torch.int32, "none")
    _, pages, planes, table, seq, entries, _, _, sink, rope = args
    rows = torch.arange(tokens * 128, device="cuda").view(tokens, 128)
    weight = (torch.randn(32768, width, device="cuda") / width**0.5 * 16).to(torch.float8_e4m3fn)
    scale = torch.full((1024, width // 32), 123, dtype=torch.uint8, device="cuda")
    norms = torch.ones(width, device="cuda").bfloat16(), torch.ones(512, device="cuda").bfloat16()
    latents = torch.randn(steps, tokens, width + 512, device="cuda").bfloat16()
    window = torch.empty(tokens * 128, 528, dtype=torch.uint8, device="cuda")
    places = rows.T.contiguous()
    order = order_for(tokens, weight)
    assert settles(tokens, weight)

    def run(settled: bool) -> list[torch.Tensor]:
        window.zero_()
        out = []
        for step in range(steps):
            query, prepared = norm_latents(
                latents[step], *norms, rope, 1e-6, window, places[step],
                () if order is None else (order,),
            )  # fmt: skip
            q = linear_fp8(query, weight, scale, prepared=prepared).view(tokens, 64, 512)
            out.append(
                sparse_attention(
                    q, pages, *planes, table, seq, entries, window, rows, sink, rope, settled=settled
                )
            )
        return out

    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(True)
    want = run(False)
    for _ in range(30):
        for part in got:
            part.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
