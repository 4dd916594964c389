"""Every kernel on a CUDA device against its reference, through the public functions and through the
benchmark's cases.

The cases draw fresh random inputs of the model's shapes; the rest here is awkward: small heads, pads,
empty rows, indices
that point outside, launches counted by the profiler, calls captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cedar.kernels.contract import ContractError
from cedar.kernels.paging import PageRangeError, Plane
from cedar.kernels.rope import rope_frequencies, rope_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("attention", "index", "select", "experts", "linear", "cache", "small")


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_hold(family: str) -> None:
    from cedar.ops.bench.kernels import cases_of

    torch.manual_seed(7)
    failures = []
    for case in cases_of(family)():
        if case.check is not None and not case.check() <= case.tolerance:
            failures.append(f"{case.operation}, {case.shape}: {case.check()}")
    assert not failures


def attention_inputs(heads: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    rows = 16
    page = rows * (width // 2 + width // 16)
    pages = torch.randint(0, 256, (9, page), dtype=torch.uint8)
    pages[:, rows * width // 2 :] = torch.randint(0x28, 0x40, (9, rows * width // 16), dtype=torch.uint8)
    window = torch.randint(0, 0x70, (40, width + width // 32), dtype=torch.uint8)
    window[:, width:] = 124
    positions = torch.randint(0, 5000, (5,))
    cos, sin = rope_table(positions, rope_frequencies(16, 10_000.0))
    entries = torch.randint(0, 64, (5, 70), dtype=torch.int32)
    entries[:, 50:] = -1
    return {
        "q": torch.randn(5, heads, width, dtype=dtype),
        "pages": pages,
        "table": torch.randperm(9)[:8].view(2, 4).to(torch.int32),
        "seq": torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32),
        "entries": entries,
        "window": window,
        "rows": torch.randint(-1, 40, (5, 37), dtype=torch.int32),
        "sink": torch.randn(heads),
        "cos": cos,
        "sin": sin,
    }


def attend(t: dict[str, torch.Tensor], rows: int = 16) -> torch.Tensor:
    from cedar.kernels.sparse_attention import sparse_attention

    width = t["q"].shape[2]
    planes = Plane(0, width // 2, rows), Plane(rows * width // 2, width // 16, rows)
    return sparse_attention(
        t["q"], t["pages"], *planes, t["table"], t["seq"], t["entries"], t["window"], t["rows"], t["sink"],
        (t["cos"], t["sin"]),
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "width"), [(3, 64), (64, 512), (20, 128)])
def test_attention_through_the_public_function(heads: int, width: int) -> None:
    inputs = attention_inputs(heads, width)
    want = attend(inputs)
    got = attend({name: t.cuda() for name, t in inputs.items()}).cpu()
    assert (got.double() - want.double()).norm() <= 3e-3 * want.double().norm()


def test_indices_outside_read_nothing_outside_and_are_named_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {name: t.cuda() for name, t in attention_inputs(64, 512).items()}
    inputs["table"][:, 1] = 2_000_000_000
    inputs["table"][:, 2] = -5
    inputs["entries"][:, 3] = 1_000_000
    inputs["rows"][:, 4] = 1_000_000
    inputs["seq"][0] = 77
    attend(inputs)
    torch.cuda.synchronize()
    monkeypatch.setenv("CEDAR_CHECK_INDICES", "1")
    with pytest.raises(PageRangeError, match="window_rows"):
        attend(inputs)
    inputs["rows"][:, 4] = 0
    with pytest.raises(PageRangeError, match="seq"):
        attend(inputs)


def test_misuse_is_refused_before_a_launch() -> None:
    inputs = {name: t.cuda() for name, t in attention_inputs(64, 512).items()}
    with pytest.raises(ContractError, match="q must be"):
        attend({**inputs, "q": inputs["q"].float()})
    with pytest.raises(ContractError, match="_plane"):
        attend(inputs, rows=17)


@pytest.mark.parametrize(
    ("rows", "count", "left_out"),
    [
        (3, 2049, 0),
        (2, 5001, 0),
        (2, 4096, 1),
        (2, 5120, 3),
        (1, 16_383, 0),
        (260, 70_001, 0),
        (260, 70_016, 5),
    ],
)
def test_top_k_of_rows_that_begin_anywhere(rows: int, count: int, left_out: int) -> None:
    """Rows that do not begin on 16 bytes are loaded otherwise, and counted alike."""
    from cedar.kernels.select import top_k

    scores = torch.randn(rows, count, generator=torch.Generator().manual_seed(count)).cuda()[:, left_out:]
    got, want = top_k(scores, 512), scores.topk(512).indices.sort(1).values
    assert torch.equal(got.to(torch.int64), want)


@pytest.mark.parametrize("count", [9000, 16_384, 32_768])
def test_top_k_of_many_short_rows(count: int) -> None:
    """As many greatest as a slice has groups: rows are cut into more slices, so that a bound is found."""
    from cedar.kernels.select import top_k

    scores = torch.randn(150, count, generator=torch.Generator().manual_seed(count))
    scores[::3] = (scores[::3] * 3).round()
    got, want = top_k(scores.cuda(), 2048), top_k(scores, 2048)
    assert torch.equal(got.cpu(), want)


def test_top_k_of_many_long_rows() -> None:
    """Eight keys a thread in the last choice."""
    from cedar.kernels import select_many_triton
    from cedar.kernels.select import top_k

    assert select_many_triton.fits(1500, 1_000_000)
    scores = torch.randn(17, 1_000_000, generator=torch.Generator().manual_seed(1))
    scores[::3] = (scores[::3] * 64).round()
    assert torch.equal(top_k(scores.cuda(), 1500).cpu(), top_k(scores, 1500))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("rows", "width"), [(256, 5003), (64, 1500), (128, 130), (256, 200_000)])
def test_index_scores_of_scales_far_apart(rows: int, width: int, tokens: int) -> None:
    """Groups of a key that differ by up to 2^159, any of them the greatest; pads and blocks of eight."""
    from cedar.kernels import fp4_ref, index_scores_ref
    from cedar.kernels.index_scores_triton import scores

    g = torch.Generator("cuda").manual_seed(width + tokens)
    planes = ((0, 64, rows), (rows * 64, 4, rows))
    pages = torch.randint(
        0, 256, (width // rows + 5, rows * 68), dtype=torch.uint8, device="cuda", generator=g
    )
    codes = pages[:, rows * 64 :]
    near = torch.randint(118, 130, codes.shape, dtype=torch.uint8, device="cuda", generator=g)
    far = torch.randint(1, 160, codes.shape, dtype=torch.uint8, device="cuda", generator=g)
    codes.copy_(torch.where(torch.rand(codes.shape, device="cuda", generator=g) < 0.3, far, near))
    table = torch.stack([torch.randperm(len(pages), device="cuda", generator=g) for _ in range(tokens)]).int()
    queries = torch.randn(tokens, 32, 128, device="cuda", generator=g).to(torch.bfloat16)
    payload, scales = fp4_ref.pack_e8m0(queries)
    weights = torch.randn(tokens, 32, device="cuda", generator=g)
    seq = torch.arange(tokens, dtype=torch.int32, device="cuda")
    visible = torch.full((tokens,), width, dtype=torch.int32, device="cuda") - 11 * seq
    where = (pages, planes, table, seq, visible, width)
    got, best = scores(payload, scales, weights, *where, blocks=True)
    assert best is not None
    q = fp4_ref.unpack_e8m0(payload, scales, torch.float64)
    truth = index_scores_ref.scores(q, weights.double(), *where)
    unsigned = pages.clone()
    unsigned[:, : rows * 64] &= 0x77
    bound = index_scores_ref.scores(q.abs(), weights.double().abs(), unsigned, *where[1:])
    seen = ~torch.isinf(truth)
    assert torch.equal(seen, ~torch.isinf(got))
    assert bool(((got.double() - truth).abs() <= 1e-6 * bound + 1e-36)[seen].all())
    padded = torch.nn.functional.pad(got, (0, -width % 8), value=-torch.inf)
    assert torch.equal(padded.view(tokens, -1, 8).amax(2), best)


def launches(run: Callable[[], object]) -> int:
    """CUDA kernels that one warm call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(
        event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA
    )


def test_launches() -> None:
    from cedar.kernels.compress_triton import write_window
    from cedar.kernels.mhc_triton import boundary, mix, sublayer

    inputs = {name: t.cuda() for name, t in attention_inputs(64, 512).items()}
    assert launches(lambda: attend(inputs)) == 1  # split and joined
    x, y = torch.randn(64, 4, 256).cuda().bfloat16(), torch.randn(64, 256).cuda().bfloat16()
    fn, scale, base = torch.randn(24, 1024).cuda(), torch.rand(3).cuda(), torch.randn(24).cuda()
    pre, post, comb = mix(x, fn, scale, base, 1e-20, 1e-6, 20)
    assert launches(lambda: mix(x, fn, scale, base, 1e-20, 1e-6, 20)) == 1
    assert launches(lambda: boundary(x, (y, post, comb), pre, (y[0], 1e-20))) == 1
    mixer = (fn, scale, base, 1e-20, 1e-6, 20)
    assert launches(lambda: sublayer(x, (y, post, comb), pre, (y[0], 1e-20), mixer)) == 1
    k, ring = torch.randn(9, 64).cuda().bfloat16(), torch.zeros(16, 66, dtype=torch.uint8).cuda()
    rope = rope_table(torch.arange(9).cuda(), rope_frequencies(16, 10_000.0).cuda())
    places = torch.arange(9).cuda()
    assert launches(lambda: write_window(k, k[0], rope, 1e-20, ring, places)) == 1


@pytest.mark.parametrize("batch", [1, 2, 8, 17, 64])
def test_a_captured_step_replays(batch: int) -> None:
    """Linear, attention-free: the operations of a sublayer captured together give what they give one by
    one.
    """
    from cedar.kernels.experts_triton import grouped_experts
    from cedar.kernels.linear_triton import linear_fp8
    from cedar.kernels.mhc_triton import boundary, mix
    from cedar.kernels.select_triton import top_k

    width = 256
    streams = torch.randn(batch, 4, width, device="cuda", dtype=torch.bfloat16)
    fn, scale, base = torch.randn(24, 4 * width).cuda() * 0.05, torch.rand(3).cuda(), torch.randn(24).cuda()
    norm = torch.rand(width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, width, device="cuda").to(torch.float8_e4m3fn)
    blocks = torch.randint(118, 122, (8, 8), dtype=torch.uint8, device="cuda")

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0, 256, (16, rows, columns // 2), dtype=torch.uint8, device="cuda")
        return payload, torch.randint(118, 122, (16, rows, columns // 32), dtype=torch.uint8, device="cuda")

    experts = (packed(128, width), packed(128, width), packed(width, 128))
    gates = torch.randn(batch, 16, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        pre, post, comb = mix(streams, fn, scale, base, 1e-20, 1e-6, 20)
        ids = top_k(gates, 3)
        y = linear_fp8(streams[:, 0].contiguous(), weight, blocks)
        y = grouped_experts(y, ids, torch.ones_like(ids, dtype=torch.float32), experts, 10.0).to(
            torch.bfloat16
        )
        out, row = boundary(streams, (y, post, comb), pre, (norm, 1e-20))
        assert row is not None
        return out, row

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
