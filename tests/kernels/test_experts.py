"""The router, the experts and the Engram gate against loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from cedar.kernels.contract import ContractError
from cedar.kernels.engram_gate import engram_gate
from cedar.kernels.experts import expand_experts, grouped_experts, swiglu, swiglu_prepared
from cedar.kernels.fp4 import pack_fp4_e8m0
from cedar.kernels.fp8 import dequantize_fp8, quantize_fp8
from cedar.kernels.linear import linear_fp8
from cedar.kernels.prepared import CODES
from cedar.kernels.router import route


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def test_route_chooses_by_bias_and_weighs_without_it() -> None:
    x, weight = random(20, 64, seed=1), random(10, 64, seed=2, scale=0.3)
    bias = torch.randn(20, 10, generator=torch.Generator().manual_seed(3))
    ids, weights = route(x, weight, bias, 3, 1.5)
    for n in range(20):
        logits = [math.fsum((x[n].double() * w.double()).tolist()) for w in weight]
        s = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
        chosen = sorted(sorted(range(10), key=lambda e, s=s, n=n: (-(s[e] + float(bias[n, e])), e))[:3])
        assert ids[n].tolist() == chosen
        wanted = torch.tensor([s[e] / math.fsum(s[c] for c in chosen) * 1.5 for e in chosen])
        torch.testing.assert_close(weights[n], wanted, rtol=3e-7, atol=0)
    same_bias = route(x, weight, bias[0], 3, 1.5)
    assert torch.equal(same_bias[0], route(x, weight, bias[:1].expand(20, 10).contiguous(), 3, 1.5)[0])


def test_route_ties_and_extremes() -> None:
    ids, weights = route(torch.zeros(2, 32).bfloat16(), random(6, 32, seed=1), torch.zeros(6), 2, 1.0)
    assert ids.tolist() == [[0, 1]] * 2
    assert weights.tolist() == [[0.5, 0.5]] * 2
    x = torch.full((1, 32), 300.0).bfloat16()
    weight = torch.stack((torch.ones(32), -torch.ones(32), torch.zeros(32))).bfloat16() * 300
    ids, weights = route(x, weight, torch.tensor([0.0, 1e9, 0.0]), 2, 1.0)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[1.0, 0.0]]


def mxfp4(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    payload, scale = pack_fp4_e8m0(random(experts * rows, columns, seed=seed, scale=0.4))
    return payload.view(experts, rows, -1), scale.view(experts, rows, -1)


def seen(x: torch.Tensor) -> torch.Tensor:
    return dequantize_fp8(*quantize_fp8(x)).double()


@pytest.mark.parametrize(("tokens", "k"), [(1, 3), (17, 2), (40, 1), (0, 2)])
def test_experts_equal_a_loop_over_tokens(tokens: int, k: int) -> None:
    experts, d, inner, limit = 9, 64, 32, 1.0
    packed = [
        t
        for n, (rows, columns) in enumerate(((inner, d), (inner, d), (d, inner)))
        for t in mxfp4(experts, rows, columns, n)
    ]
    w1, w3, w2 = expanded = tuple(expand_experts(packed[i], packed[i + 1]) for i in (0, 2, 4))
    x, g = random(tokens, d, seed=4), torch.Generator().manual_seed(5)
    ids = torch.stack(
        [torch.randperm(experts, generator=g)[:k] for _ in range(tokens)] or [torch.zeros(k)]
    ).int()[:tokens]
    weights = torch.rand(tokens, k, generator=g)
    got = grouped_experts(x, ids, weights, *packed, limit)
    assert got.dtype == torch.float32
    assert torch.equal(grouped_experts(x, ids, weights, *packed, limit, expanded=expanded), got)
    for n in range(tokens):
        total = torch.zeros(d)
        for slot in range(k):
            e = int(ids[n, slot])
            gate = (w1[e] * seen(x[n])).sum(-1).bfloat16().double().clamp_max(limit)
            up = (w3[e] * seen(x[n])).sum(-1).bfloat16().double().clamp(-limit, limit)
            hidden = (gate * torch.sigmoid(gate) * up * float(weights[n, slot])).bfloat16()
            total += (w2[e] * seen(hidden)).sum(-1).bfloat16().float()
        assert torch.equal(got[n], total)


def test_experts_that_nobody_chose_are_not_read() -> None:
    packed = [t for n, shape in enumerate(((32, 64), (32, 64), (64, 32))) for t in mxfp4(4, *shape, n)]
    x, ids = random(3, 64, seed=1), torch.tensor([[1], [3], [1]], dtype=torch.int32)
    before = grouped_experts(x, ids, torch.ones(3, 1), *packed, 10.0)
    for tensor in packed:
        tensor[[0, 2]] = 0xFF  # NaN scales
    assert torch.equal(grouped_experts(x, ids, torch.ones(3, 1), *packed, 10.0), before)


def test_swiglu_clamps_gate_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([20.0, -20.0, 1.0, 9.0]).bfloat16()
    up = torch.tensor([20.0, 1.0, -20.0, 0.5]).bfloat16()
    silu = [v / (1 + math.exp(-v)) for v in (10.0, -20.0, 1.0, 9.0)]
    wanted = torch.tensor([s * u for s, u in zip(silu, (10.0, 1.0, -10.0, 0.5), strict=True)])
    assert torch.equal(swiglu(gate, up, 10.0), wanted.bfloat16())


def test_engram_gate() -> None:
    x, key, value = random(6, 4, 32, seed=1, scale=0.1), random(6, 4, 32, seed=2), random(6, 32, seed=3)
    q_weight, k_weight = random(4, 32, seed=4), random(4, 32, seed=5)
    is_image = torch.tensor([False, True, False, False, True, False])
    key[3, 2] = 0  # nothing to compare with: the sign is 0, the gate one half
    got = engram_gate(x, key, value, q_weight, k_weight, is_image, 1e-20)
    for n in range(6):
        for s in range(4):
            xs, ks = x[n, s].double(), key[n, s].double()
            norm = (float(xs.square().mean()) + 1e-20) ** -0.5 * (float(ks.square().mean()) + 1e-20) ** -0.5
            a = float((xs * q_weight[s].double() * k_weight[s].double() * ks).sum()) * norm * 32**-0.5
            root = math.copysign(math.sqrt(max(abs(a), 1e-6)), a) if a else 0.0
            gate = 0.0 if is_image[n] else 1 / (1 + math.exp(-root))
            assert torch.equal(got[n, s], (xs + gate * value[n].double()).bfloat16())


def test_a_product_takes_what_its_producer_quantised() -> None:
    """SwiGLU in order CODES is SwiGLU, then quantised; a product of it is that of its values."""
    generator = torch.Generator().manual_seed(5)
    halves = (3 * torch.randn(4, 192, generator=generator)).bfloat16()
    first, second = halves.chunk(2, dim=1)
    hidden = swiglu_prepared(first, second, 2.0, CODES)
    values, scale = quantize_fp8(swiglu(first, second, 2.0))
    assert hidden.scale is not None
    assert torch.equal(hidden.scale, scale)
    assert torch.equal(hidden.values.view(torch.uint8), values.view(torch.uint8))
    weight = torch.randn(40, 96, generator=generator).to(torch.float8_e4m3fn)
    blocks = torch.full((2, 3), 121, dtype=torch.uint8)
    want = linear_fp8(dequantize_fp8(values, scale), weight, blocks)
    assert torch.equal(linear_fp8(hidden, weight, blocks), want)
    with pytest.raises(ContractError, match="x is in order 0, not 8"):
        linear_fp8(hidden._replace(order=0), weight, blocks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
def test_the_kernel_quantises_alike() -> None:
    pytest.importorskip("triton")
    from cedar.kernels import experts_triton

    halves = (3 * torch.randn(4, 192, generator=torch.Generator().manual_seed(6))).bfloat16()
    first, second = halves.chunk(2, dim=1)
    got, want = experts_triton.swiglu_codes(first, second, 2.0), swiglu_prepared(first, second, 2.0, CODES)
    assert got.scale is not None
    assert want.scale is not None
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
