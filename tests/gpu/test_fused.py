"""The fused operations of the serving network on a CUDA device, each against its reference and in one
launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cedar.kernels import prepared_ref, router_ref
from cedar.kernels.decode_tables import DecodeTables, decode_tables
from cedar.kernels.experts import swiglu, swiglu_prepared
from cedar.kernels.feed_forward import RoutedWeights, SharedWeights, feed_forward
from cedar.kernels.fp8 import dequantize_fp8
from cedar.kernels.group_tails import join_tails
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.index_queries import pack_index_queries
from cedar.kernels.latents import Staging, norm_latents
from cedar.kernels.linear import linear_dense
from cedar.kernels.mhc import Mixes, Pending, mhc_boundary, mhc_mix, mhc_pass, mhc_settle
from cedar.kernels.paging import PageRangeError
from cedar.kernels.prepared import CODES, Prepared
from cedar.kernels.rope import rope_frequencies, rope_table
from cedar.kernels.router import route
from cedar.kernels.sampling import draw_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPS = 1e-20


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def cuda(value: Any) -> Any:
    """Tensors of a (named) tuple, or a tensor, on the device."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    moved = [cuda(part) for part in value]
    return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)


def launches(run: Callable[[], object]) -> int:
    """CUDA kernels that a warm call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    return sum(e.count for e in profile.key_averages() if e.device_type == kind and "Activity" not in e.key)


def norms(tokens: int, queries: int, keys: int) -> tuple[Any, ...]:
    positions = torch.randint(0, 1_000_000, (tokens,), generator=torch.Generator().manual_seed(1))
    rope = rope_table(positions, rope_frequencies(32, 160_000.0))
    weights = randn(queries).bfloat16(), randn(keys).bfloat16()
    return randn(tokens, queries + keys).bfloat16(), *weights, rope, EPS


@pytest.mark.parametrize(("tokens", "queries", "keys"), [(1, 1280, 512), (37, 96, 128)])
def test_latents(tokens: int, queries: int, keys: int) -> None:
    given, row = norms(tokens, queries, keys), keys + keys // 32
    places = torch.randperm(tokens + 5)[:tokens]
    places[0] = -1 if tokens > 1 else 3
    want, got = (torch.zeros(tokens + 5, row, dtype=torch.uint8) for _ in range(2))
    query, _ = norm_latents(*given, want, places)
    on_card, got = cuda(given[:4]), got.cuda()
    found, (codes,) = norm_latents(*on_card, EPS, got, places.cuda(), (CODES,))
    assert torch.equal(found.cpu(), query)
    assert same_codes(codes, found)
    assert torch.equal(got.cpu(), want)
    assert (
        launches(lambda: norm_latents(*on_card, EPS, got, places.cuda(), (1,))) <= 2
    )  # and the copy of places


def same_codes(got: object, want: torch.Tensor) -> bool:
    """Whether `got` is what a launch that quantises makes of `want`."""
    made = prepared_ref.prepared(want.cpu(), CODES)
    assert isinstance(got, Prepared)
    assert got.scale is not None
    assert made.scale is not None
    values = torch.equal(got.values.view(torch.uint8).cpu(), made.values.view(torch.uint8))
    return values and torch.equal(got.scale.cpu(), made.scale)


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        *((tokens, (8, 64, 512)) for tokens in (17, 64, 65)),
        *((tokens, (8, 1024, 4096)) for tokens in (1, 128)),
        (3, (8, 64, 4096)),
        (8, (2, 128, 512)),
        (100, (2, 128, 4096)),
    ],
)
def test_grouped_output_as_codes(tokens: int, shape: tuple[int, int, int]) -> None:
    groups, _, channels = shape
    o = randn(tokens, groups, channels).bfloat16().cuda()
    weight = (randn(*shape) * channels**-0.5).bfloat16().cuda()
    got = grouped_output(o, weight, (CODES,))
    assert isinstance(got, Prepared)
    assert got.scale is not None
    made = prepared_ref.prepared(grouped_output(o, weight).cpu(), CODES)
    assert made.scale is not None
    assert torch.equal(got.scale.cpu(), made.scale)
    same = got.values.view(torch.uint8).cpu() == made.values.view(torch.uint8)
    assert same.double().mean() > 0.999  # sums in another order, rounded the other way
    assert launches(lambda: grouped_output(o, weight, (CODES,))) == 1
    between = torch.zeros(12, groups, channels, dtype=torch.bfloat16, device="cuda")
    assert isinstance(grouped_output(between, weight, (CODES,)), torch.Tensor)


@pytest.mark.parametrize(("tokens", "width"), [(1, 5120), (3, 256), (8, 1280), (20, 640), (70, 640)])
def test_a_mix_left_to_the_next_boundary(tokens: int, width: int) -> None:
    """Three boundaries in a row, as in a stack: the same streams, rows and mixes as with mixes made at
    once.
    """
    streams, norm = randn(tokens, 4, width).bfloat16(), torch.rand(width).bfloat16()
    outputs = [randn(tokens, width, seed=i).bfloat16() for i in range(3)]
    mixers = [(randn(24, 4 * width, seed=i) * 0.05, torch.rand(3) + 0.5, randn(24, seed=i)) for i in range(4)]
    numbers = (EPS, 1e-6, 20)
    got, found = streams.cuda(), mhc_mix(streams.cuda(), *cuda(mixers[0]), *numbers)
    left: Mixes | Pending = found
    for y, mixer in zip(outputs, mixers[1:], strict=True):
        pre, post, comb = found
        given = (*cuda((norm,)), EPS)
        want = mhc_boundary(got, y.cuda(), post, comb, pre, *given, mix=(*cuda(mixer), *numbers))
        torch.cuda.synchronize()  # in a stack launches lie between
        new, row, left, (codes,) = mhc_pass(got, y.cuda(), left, *given, (*cuda(mixer), *numbers), (CODES,))
        assert torch.equal(new, want[0])
        assert torch.equal(row, want[1])
        assert same_codes(codes, row)
        got, found = want[0], want[2]
    assert isinstance(left, Pending) == (tokens <= 32)
    for part, other in zip(mhc_settle(left), found, strict=True):
        assert torch.equal(part, other)


@pytest.mark.parametrize("width", [96, 2304])
def test_swiglu_as_codes(width: int) -> None:
    halves = (3 * randn(70, 2 * width)).bfloat16().cuda()
    first, second = halves.chunk(2, dim=1)
    assert same_codes(swiglu_prepared(first, second, 4.0, CODES), swiglu(first, second, 4.0))
    assert launches(lambda: swiglu_prepared(first, second, 4.0, CODES)) == 1


def test_a_chunk_is_staged_in_one_launch() -> None:
    tokens, window, given = 40, 16, norms(40, 96, 128)
    rings = torch.randint(0, 255, (64, 132), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(tokens)
    saved, targets = (
        positions % window,
        torch.where(positions >= tokens - window, 32 + positions % window, -1),
    )
    sources = torch.full((window,), -1)
    buffers = [torch.zeros(window + tokens, 132, dtype=torch.uint8) for _ in range(2)]
    places = torch.arange(window, window + tokens)
    on_card = rings.cuda()
    norm_latents(*given, buffers[0], places, staging=Staging(rings, sources, targets, saved))
    staging = Staging(on_card, *cuda((sources, targets, saved)))
    buffer = buffers[1].cuda()
    norm_latents(*cuda(given[:4]), EPS, buffer, places.cuda(), staging=staging)
    assert torch.equal(buffer.cpu(), buffers[0])
    assert torch.equal(on_card.cpu(), rings)


@pytest.mark.parametrize(
    ("tokens", "width"),
    [(1, 5120), (3, 256), (7, 1280), (20, 640), (70, 5120), (600, 1280), (1100, 4160)],
)
def test_boundary_with_mix(tokens: int, width: int) -> None:
    """One launch at every size: streams, normed rows and their codes bit for bit, mixes closely."""
    x, y, norm = randn(tokens, 4, width).bfloat16(), randn(tokens, width).bfloat16(), torch.rand(width)
    mix = (randn(24, 4 * width) * 0.05, torch.tensor([0.7, 1.3, 0.9]), randn(24), EPS, 1e-6, 20)
    pre, post, comb = mhc_mix(x, *mix)
    given = (x, y, post, comb, pre, norm.bfloat16())
    on_card = cuda(given), (*cuda(mix[:3]), *mix[3:])

    def run() -> tuple[torch.Tensor, torch.Tensor, Mixes, tuple[Prepared, ...]]:
        return mhc_boundary(*on_card[0], EPS, mix=on_card[1], orders=(CODES,))

    streams, row, mixes, (codes,) = mhc_boundary(*given, EPS, mix=mix, orders=(CODES,))
    got_streams, got_row, got_mixes, (got,) = run()
    assert torch.equal(got_streams.cpu(), streams)
    assert torch.equal(got_row.cpu(), row)
    for part, want in zip(got_mixes, mixes, strict=True):
        torch.testing.assert_close(part.cpu(), want, rtol=1e-4, atol=1e-5)
    assert codes.scale is not None
    assert got.scale is not None
    assert torch.equal(got.values.cpu().view(torch.uint8), codes.values.view(torch.uint8))
    assert torch.equal(got.scale.cpu(), codes.scale)
    assert launches(run) == 1


@pytest.mark.parametrize(
    ("tokens", "outputs", "columns"), [(1, 8, 256), (1, 32, 5120), (3, 100, 512), (16, 640, 640)]
)
def test_plain_product_of_few_rows(tokens: int, outputs: int, columns: int) -> None:
    x = randn(tokens, columns).bfloat16().cuda()
    weight = (randn(outputs, columns) * columns**-0.5).bfloat16().cuda()
    want = x.double() @ weight.double().T
    torch.testing.assert_close(linear_dense(x, weight, torch.float32).double(), want, rtol=1e-4, atol=1e-5)
    assert launches(lambda: linear_dense(x, weight)) == 1


@pytest.mark.parametrize(
    ("tokens", "experts", "width"),
    [
        (1, 384, 5120),
        (1, 16, 256),
        (1, 30, 512),
        (1, 500, 1280),
        (2, 384, 5120),
        (70, 384, 5120),
        (300, 8, 192),
        (1100, 384, 512),
    ],
)
def test_router(tokens: int, experts: int, width: int) -> None:
    x, gate = randn(tokens, width).bfloat16(), (randn(experts, width) * width**-0.5).bfloat16()
    bias = randn(experts) * 0.1
    ids, weights = router_ref.route(x, gate, bias, 6, 1.5)
    on_card = cuda((x, gate, bias))
    found, values = route(*on_card, 6, 1.5)
    same = (found.cpu() == ids).all(1)
    assert same.double().mean() > 0.98  # ties within the rounding of a sum
    torch.testing.assert_close(values.cpu()[same], weights[same], rtol=1e-4, atol=1e-6)
    assert launches(lambda: route(*on_card, 6, 1.5)) == (1 if tokens <= 256 else 2)


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_a_router_after_eight_million_launches(tokens: int) -> None:
    """The counter at which its programs meet has become negative by then."""
    from cedar.kernels import router_triton

    x, gate = randn(tokens, 5120).bfloat16(), (randn(384, 5120) * 5120**-0.5).bfloat16()
    on_card = cuda((x, gate, randn(384) * 0.1))
    want = route(*on_card, 6, 1.5)
    router_triton._meetings(torch.device("cuda:0")).fill_(-(1 << 31))
    for got, value in zip(route(*on_card, 6, 1.5), want, strict=True):
        assert torch.equal(got, value)
    router_triton._meetings(torch.device("cuda:0")).zero_()


@pytest.mark.parametrize(
    ("tokens", "inner", "width"),
    [
        *((1, 384, 512), (1, 512, 1280), (1, 768, 256)),
        *((tokens, 384, 512) for tokens in (5, 9, 16, 17, 33, 64, 85, 128)),
    ],
)
def test_feed_forward(tokens: int, inner: int, width: int) -> None:
    g = torch.Generator().manual_seed(tokens)

    def fp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
        scale = torch.randint(118, 122, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=g)
        return payload, scale

    def fp8(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.randint(118, 122, (shape[0] // 32, shape[1] // 32), dtype=torch.uint8, generator=g)
        return torch.randn(*shape, generator=g).to(torch.float8_e4m3fn), scale

    experts = 40
    routed = RoutedWeights(
        *fp4(experts, inner, width), *fp4(experts, inner, width), *fp4(experts, width, inner)
    )
    shared = SharedWeights(*fp8(2 * inner, width), *fp8(width, inner))
    gate, bias = (
        (torch.randn(experts, width, generator=g) * 0.04).bfloat16(),
        torch.randn(experts, generator=g),
    )
    x = torch.randn(tokens, width, generator=g).bfloat16()
    want = feed_forward(x, gate, bias, 6, 1.5, routed, shared, 10.0).double()
    on_card = cuda((x, gate, bias)), cuda(routed), cuda(shared)

    def run() -> torch.Tensor:
        return feed_forward(*on_card[0], 6, 1.5, *on_card[1:], 10.0)

    got = run().cpu().double()
    assert (got - want).norm() < 3e-3 * want.norm()
    assert launches(run) == 3


def sampling_rules(count: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(count)

    def one_of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (count,), generator=g)]

    fraction = torch.float32
    return (
        torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=g),
        torch.randint(0, 1 << 40, (count,), generator=g),
        one_of([0.0, 0.3, 1.0, 2.5], fraction).double(),
        one_of([0, 0, 1, 40, 1000, 1 << 20], torch.int64),
        one_of([1.0, 1.0, 0.999, 0.9, 0.5], fraction).double(),
        one_of([0.0, 0.0, 0.05, 1.0], fraction).double(),
    )


@pytest.mark.parametrize("width", [1, 640, 5000, 129_280])
@pytest.mark.parametrize("kind", ["random", "tied", "flat"])
def test_a_token_is_the_same_on_every_device(width: int, kind: str) -> None:
    """Bit for bit: the ids, the logits and the mass; alone, in a batch, and in another order."""
    rows = 12 if width > 100_000 else 48
    logits = randn(rows, width) * (0.2 if kind == "flat" else 3)
    logits = logits.round() if kind == "tied" else logits
    given = sampling_rules(rows)
    want = draw_tokens(logits, *given)
    on_card = cuda((logits, *given))
    assert torch.equal(draw_tokens(*on_card).packed.cpu(), want.packed)
    assert torch.equal(draw_tokens(*(part.flip(0) for part in on_card)).packed.flip(1).cpu(), want.packed)
    assert torch.equal(draw_tokens(*(part[7:8] for part in on_card)).packed.cpu(), want.packed[:, 7:8])
    assert launches(lambda: draw_tokens(*on_card)) == 1


def test_logits_that_are_not_finite_are_told() -> None:
    logits = randn(4, 3000)
    logits[1, 2999], logits[2, 0] = float("nan"), float("-inf")
    draws = draw_tokens(*cuda((logits, *sampling_rules(4))))
    assert (draws.ids < 0).tolist() == [False, True, True, False]


def test_small_tables_and_packers() -> None:
    positions = torch.tensor([0, 1, 77, 999_999])
    freqs = rope_frequencies(64, 10_000.0)
    for got, want in zip(rope_table(*cuda((positions, freqs))), rope_table(positions, freqs), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=3e-7)
    rows = [(5, 0, 0, 0, 0, 0, 1), (6, 7, 3, 0, 4, 0, 1), (7, 8, 1, 5, 0, 0, 1), (8, 8, 1, 5, 0, 9, 0)]
    fields = torch.tensor(rows).T.contiguous()
    want = decode_tables(fields, 5, 40, (1, 2))
    got = decode_tables(fields.cuda(), 5, 40, (1, 2))
    for name, a, b in zip(DecodeTables._fields, got, want, strict=True):
        assert torch.equal(a.cpu(), b), name
    q, weights = randn(4, 32, 128).bfloat16(), randn(4, 32).bfloat16()
    rope = rope_table(positions, rope_frequencies(64, 10_000.0))
    packed, wanted = (
        pack_index_queries(*cuda((q, weights, rope)), 0.1),
        pack_index_queries(q, weights, rope, 0.1),
    )
    assert torch.equal(packed.payload.cpu(), wanted.payload)
    assert torch.equal(packed.scales.cpu(), wanted.scales)
    torch.testing.assert_close(packed.weights.cpu().double(), wanted.weights, rtol=1e-6, atol=0)
    payload = randn(9, 256).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 140, (9, 8), dtype=torch.uint8)
    assert torch.equal(dequantize_fp8(*cuda((payload, scale))).cpu(), dequantize_fp8(payload, scale))


def test_tails_of_open_groups() -> None:
    tails, slots = randn(5, 2, 1, 512), torch.tensor([3, 0, 4])
    kv, gate, places = randn(3, 512), randn(3, 512, seed=1), torch.tensor([0, -1, 0])
    on_card = cuda((kv, gate, tails, slots, places))
    want = join_tails(kv, gate, tails, slots, places)
    for a, b in zip(join_tails(*on_card), want, strict=True):
        assert torch.equal(a.cpu(), b)
    assert torch.equal(on_card[2].cpu(), tails)


def test_indices_outside_are_not_followed_and_are_named_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    given, window = cuda(norms(6, 96, 128)[:4]), torch.zeros(8, 132, dtype=torch.uint8, device="cuda")
    places = torch.tensor([0, 1, 2, 2_000_000_000, -7, 8], device="cuda")
    norm_latents(*given, EPS, window, places)
    kept = window.clone()
    assert kept[:3].any(1).all()
    assert not kept[3:].any()
    tails = torch.zeros(3, 2, 1, 512, device="cuda")
    rows = torch.zeros(2, 512, device="cuda")
    join_tails(rows, rows, tails, torch.tensor([9, -4], device="cuda"), torch.tensor([5, -1], device="cuda"))
    torch.cuda.synchronize()
    monkeypatch.setenv("CEDAR_CHECK_INDICES", "1")
    with pytest.raises(PageRangeError, match="places holds 2000000000"):
        norm_latents(*given, EPS, window, places)
    with pytest.raises(PageRangeError, match="slots holds"):
        join_tails(
            rows, rows, tails, torch.tensor([9, -4], device="cuda"), torch.tensor([0, -1], device="cuda")
        )
