"""What a chunk's layer launches on a CUDA device: products that quantise, expand and gate in one launch,
choices in tiles, the whole feed-forward, each against its parts or its reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cedar.kernels.experts import swiglu
from cedar.kernels.feed_forward import RoutedWeights, SharedWeights, feed_forward
from cedar.kernels.fp8 import dequantize_fp8, expand_fp8_blocks, quantize_fp8
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.linear import linear_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def launches(run: Callable[[], object]) -> int:
    """CUDA kernels that a warm call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    return sum(e.count for e in profile.key_averages() if e.device_type == kind and "Activity" not in e.key)


def fp8(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = torch.randint(112, 122, (rows // 32, columns // 32), dtype=torch.uint8, generator=g)
    return torch.randn(rows, columns, generator=g).to(torch.float8_e4m3fn).cuda(), scale.cuda()


def rows(tokens: int, columns: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens + columns)
    spread = torch.exp(torch.randn(tokens, 1, generator=g) * 3)
    return (torch.randn(tokens, columns, generator=g) * spread).bfloat16().cuda()


def wide(x: torch.Tensor) -> torch.Tensor:
    """x quantised, read back, in the order GROUPED."""
    from cedar.kernels.linear_triton import GROUPED, permuted

    return permuted(x, GROUPED)


@pytest.mark.parametrize(
    ("tokens", "outputs", "columns"), [(1, 256, 640), (300, 512, 640), (2100, 4608, 640)]
)
def test_bulk(tokens: int, outputs: int, columns: int) -> None:
    from cedar.kernels import linear_bulk_hopper
    from cedar.kernels.linear_triton import GROUPED
    from cedar.kernels.prepared import Prepared

    (weight, scale), x = fp8(outputs, columns, tokens), rows(tokens, columns)
    want = dequantize_fp8(*quantize_fp8(x)).double() @ expand_fp8_blocks(weight, scale, torch.float64).T
    for _ in range(3):
        got = linear_bulk_hopper.product(x, weight, scale)
        error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.max()) < 3e-3  # of which bf16 2e-3
    ready = Prepared(wide(x), GROUPED)
    assert torch.equal(linear_bulk_hopper.product(x, weight, scale, (ready,)), got)
    assert launches(lambda: linear_bulk_hopper.product(x, weight, scale)) == 1
    gate, up = got.chunk(2, dim=1)
    hidden = linear_bulk_hopper.gated(x, weight, scale, 2.0)
    assert torch.equal(hidden.values, wide(swiglu(gate, up, 2.0)))
    assert launches(lambda: linear_bulk_hopper.gated(x, weight, scale, 2.0)) == 1


def test_grouped_output_as_the_next_product_meets_it() -> None:
    from cedar.kernels.linear_triton import GROUPED
    from cedar.kernels.prepared import Prepared

    g = torch.Generator().manual_seed(1)
    o = torch.randn(1100, 4, 512, generator=g).bfloat16().cuda()
    weight = (torch.randn(4, 128, 512, generator=g) * 512**-0.5).bfloat16().cuda()
    plain, got = grouped_output(o, weight), grouped_output(o, weight, (GROUPED,))
    want = wide(plain)
    assert isinstance(got, Prepared)
    assert float((got.values.double() - want.double()).norm() / want.double().norm()) < 3e-3
    assert launches(lambda: grouped_output(o, weight, (GROUPED,))) == 1
    w, s = fp8(256, 512, 2)
    want, found = linear_fp8(plain, w, s).double(), linear_fp8(got, w, s).double()
    assert float((found - want).norm() / want.norm()) < 3e-3


def ordered(x: torch.Tensor) -> torch.Tensor:
    """x quantised, read back, each 128 channels as expanded MXFP4 weights meet them."""
    m = torch.arange(x.shape[1], device="cuda")
    place = (((m % 32 // 8) * 4 + m % 4) * 4 + m % 128 // 32) * 2 + m % 8 // 4
    out = torch.empty_like(x)
    out[:, m // 128 * 128 + place] = dequantize_fp8(*quantize_fp8(x)).to(x.dtype)
    return out


@pytest.mark.parametrize(
    ("tokens", "experts", "together", "parts"),
    [(20, 384, 8, 5), (513, 384, 8, 5), (4097, 100, 80, 1), (90, 3, 80, 1)],
)
def test_choices_in_tiles(tokens: int, experts: int, together: int, parts: int) -> None:
    """Selection and weights as apart; every choice once, in tiles of its expert; rows quantised as apart."""
    from cedar.kernels import bands_hopper, experts_hopper, router_triton
    from cedar.kernels.router_tiles_hopper import sort_rows

    g = torch.Generator().manual_seed(tokens)
    k = min(6, experts)
    x = rows(tokens, 512)
    logits = torch.randn(parts, tokens, experts, generator=g).cuda()
    bias = (torch.randn(experts, generator=g) * 0.1).cuda()
    total = logits[0].clone()
    for part in logits[1:]:
        total += part
    ids, weights = router_triton.choose(total, bias, k, 1.5)
    for _ in range(3):
        found = sort_rows(x, logits, bias, k, 1.5, together)
        assert torch.equal(found.weights, weights)
        slots, owners = found.slots.view(-1, together).cpu(), found.owners.cpu()
        used = slots[owners >= 0]
        assert torch.equal(used[used >= 0].sort().values, torch.arange(tokens * k, dtype=torch.int32))
        owned = owners[owners >= 0].unsqueeze(1).expand_as(used)[used >= 0]
        assert torch.equal(ids.cpu().flatten()[used[used >= 0].long()], owned)
        needed = -(-torch.bincount(ids.cpu().flatten(), minlength=experts) // together)
        assert torch.equal(torch.bincount(owners[owners >= 0], minlength=experts), needed)
        assert bool(((used >= 0).int().diff(dim=1) <= 0).all())  # a tile's slots come first
    if together == 8:
        bands, scales = bands_hopper.quantised(x)
        assert torch.equal(found.seen, bands)
        assert found.scales is not None
        assert torch.equal(found.scales, scales)
    else:
        there = ((found.slots.view(-1, together) >= 0) & (found.owners >= 0).unsqueeze(1)).flatten()
        want = ordered(x)[found.slots[there].long() // k]
        assert torch.equal(found.seen[there], want)
        places = torch.empty(tokens * k, dtype=torch.int32, device="cuda")
        places[found.slots[there].long()] = there.nonzero().flatten().to(torch.int32)
        assert torch.equal(experts_hopper.quantised(x, places, found.slots.numel())[there], want)
        assert bool((found.slots.view(-1, together)[found.owners < 0] == -1).all())
    assert launches(lambda: sort_rows(x, logits, bias, k, 1.5, together)) == 1


@pytest.mark.parametrize(
    ("tokens", "experts", "inner", "width"),
    [(23, 2, 128, 256), (80, 1, 128, 512), (81, 1, 256, 768), (640, 9, 384, 256), (2500, 11, 256, 1280)],
)
def test_experts_of_many(tokens: int, experts: int, inner: int, width: int) -> None:
    """Every number of columns of a product, tiles that are full or have one slot, few and many items."""
    from cedar.kernels import experts_ref, experts_triton

    g = torch.Generator().manual_seed(tokens)

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=g)
        scale = torch.randint(112, 122, (experts, rows, columns // 32), dtype=torch.uint8, generator=g)
        return payload.cuda(), scale.cuda()

    k = min(2, experts)
    weights = (packed(inner, width), packed(inner, width), packed(width, inner))
    shares = torch.linspace(0.05, 1, experts).expand(tokens, -1)
    ids = shares.multinomial(k, generator=g).sort(1).values.to(torch.int32).cuda()
    x, routing = rows(tokens, width), torch.rand(tokens, k, generator=g).cuda()
    want = experts_ref.grouped_experts(x, ids, routing, weights, None, 7.3)
    for _ in range(2):
        got = experts_triton.grouped_experts(x, ids, routing, weights, 7.3)
        assert torch.isfinite(got).all()
        assert (got - want).norm() < 1e-3 * want.norm()
    assert launches(lambda: experts_triton.grouped_experts(x, ids, routing, weights, 7.3)) <= 6
    outside = ids.long()
    outside[::7, 0], outside[3::7, -1] = 1 << 40, -3  # what no router gives stays within the weights
    taken = experts_triton.grouped_experts(x, outside.clamp(0, experts - 1), routing, weights, 7.3)
    assert torch.equal(experts_triton.grouped_experts(x, outside, routing, weights, 7.3), taken)


@pytest.mark.parametrize("tokens", [100, 300, 1200])
def test_feed_forward_of_many(tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)

    def fp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
        scale = torch.randint(118, 122, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=g)
        return payload.cuda(), scale.cuda()

    experts, inner, width = 40, 384, 512
    routed = RoutedWeights(
        *fp4(experts, inner, width), *fp4(experts, inner, width), *fp4(experts, width, inner)
    )
    shared = SharedWeights(*fp8(2 * inner, width, 1), *fp8(width, inner, 2))
    gate = (torch.randn(experts, width, generator=g) * 0.04).bfloat16().cuda()
    bias = torch.randn(experts, generator=g).cuda()
    x = torch.randn(tokens, width, generator=g).bfloat16().cuda()

    def run() -> torch.Tensor:
        return feed_forward(x, gate, bias, 6, 1.5, routed, shared, 10.0)

    some = torch.arange(0, tokens, 7)
    on_host = [RoutedWeights(*(t.cpu() for t in routed)), SharedWeights(*(t.cpu() for t in shared))]
    want = feed_forward(x[some].cpu(), gate.cpu(), bias.cpu(), 6, 1.5, *on_host, 10.0).double()
    got = run()[some].cpu().double()
    assert (got - want).norm() < 3e-3 * want.norm()
