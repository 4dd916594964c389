"""RoPE, RMSNorm, the linear products, the grouped output and the compressor against plain definitions."""

from __future__ import annotations

import math

import pytest
import torch
from cedar.kernels.compress import compress_entries, pool_groups
from cedar.kernels.fp4 import pack_fp4_e4m3, pack_fp4_e8m0
from cedar.kernels.fp8 import dequantize_fp8, expand_fp8_blocks, quantize_fp8
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.linear import linear_dense, linear_fp8
from cedar.kernels.norm import rms_norm
from cedar.kernels.rope import YarnParams, apply_rope, rope_frequencies

YARN = YarnParams(factor=16, beta_fast=32, beta_slow=1, original_positions=65536)


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def test_yarn_ramp_of_the_published_size() -> None:
    plain, yarn = rope_frequencies(64, 160_000), rope_frequencies(64, 160_000, YARN)
    assert torch.equal(yarn[:16], plain[:16])  # low = 15
    assert torch.equal(yarn[25:], plain[25:] / 16)  # high = 25
    ramp = 0.5
    torch.testing.assert_close(yarn[20], plain[20] * (1 - ramp) + plain[20] / 16 * ramp)
    assert plain[0] == 1
    assert plain.dtype == torch.float32
    torch.testing.assert_close(
        plain[31].double(), torch.tensor(160_000 ** (-62 / 64), dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("shape", [(7, 24), (7, 3, 24), (7, 2, 3, 16), (0, 4, 16)])
def test_rope_turns_interleaved_pairs_of_the_last_channels(shape: tuple[int, ...]) -> None:
    x, freqs = random(*shape, seed=1), rope_frequencies(16, 10_000)
    positions = torch.tensor([0, 1, 5, 100, 4000, 65_000, 1_000_000])[: shape[0]]
    got = apply_rope(x, positions, freqs)
    assert torch.equal(got[..., :-16], x[..., :-16])
    angle = (positions.float().unsqueeze(1) * freqs).double()  # the angle itself is rounded to fp32
    turn = torch.polar(torch.ones_like(angle), angle).view(shape[0], *([1] * (len(shape) - 2)), 8)
    pairs = torch.view_as_complex(x[..., -16:].double().unflatten(-1, (8, 2)).contiguous())
    wanted = torch.view_as_real(pairs * turn).flatten(-2)
    torch.testing.assert_close(got[..., -16:].double(), wanted, rtol=2**-8, atol=1e-6)
    back = apply_rope(got, positions, freqs, inverse=True)
    torch.testing.assert_close(back, x, rtol=2**-6, atol=2**-6)
    assert torch.equal(apply_rope(x, torch.zeros_like(positions), freqs), x)


def test_rope_of_strided_input_leaves_it_alone() -> None:
    wide = random(5, 4, 40, seed=2)
    x = wide[:, 1:3, :24]
    before = wide.clone()
    got = apply_rope(x, torch.arange(5), rope_frequencies(16, 1e4))
    assert torch.equal(wide, before)
    assert torch.equal(got, apply_rope(x.contiguous(), torch.arange(5), rope_frequencies(16, 1e4)))


@pytest.mark.parametrize("scale", [1.0, 0.12, 1e-12])
def test_rms_norm_at_real_magnitudes(scale: float) -> None:
    x, weight = random(9, 128, seed=3, scale=scale), random(128, seed=4, scale=0.025)
    for row, got in zip(x, rms_norm(x, weight, 1e-20), strict=True):
        mean = math.fsum(float(v) ** 2 for v in row) / 128
        wanted = torch.tensor(
            [float(v) * (mean + 1e-20) ** -0.5 * float(w) for v, w in zip(row, weight, strict=True)],
            dtype=torch.float64,
        )
        assert torch.equal(got, wanted.bfloat16())
    assert torch.equal(
        rms_norm(torch.zeros(2, 128).bfloat16(), weight, 1e-20), torch.zeros(2, 128).bfloat16()
    )


def test_linear_fp8_quantises_its_input_and_rounds_once() -> None:
    weight = random(40, 96, seed=5).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 130, (2, 3), generator=torch.Generator().manual_seed(6), dtype=torch.uint8)
    x = random(3, 5, 96, seed=7)
    full = expand_fp8_blocks(weight, scale, torch.float64)
    got = linear_fp8(x, weight, scale)
    seen = dequantize_fp8(*quantize_fp8(x)).double()
    assert torch.equal(got, (seen.unsqueeze(-2) * full).sum(-1).bfloat16())
    assert torch.equal(linear_fp8(x, weight, scale, expanded=full), got)
    assert linear_fp8(x[:0], weight, scale).shape == (0, 5, 40)


def test_linear_dense_dtypes() -> None:
    x, weight = random(6, 50, seed=8), random(7, 50, seed=9)
    exact = (x.double().unsqueeze(1) * weight.double()).sum(-1)
    assert torch.equal(linear_dense(x, weight), exact.bfloat16())
    assert torch.equal(
        linear_dense(x, weight.double(), torch.float32), linear_dense(x, weight, torch.float32)
    )
    torch.testing.assert_close(linear_dense(x.float(), weight, torch.float64), exact, rtol=1e-13, atol=1e-13)


def test_grouped_output_is_block_diagonal() -> None:
    o, weight = random(5, 3, 40, seed=10), random(3, 6, 40, seed=11)
    got = grouped_output(o, weight)
    for group in range(3):
        assert torch.equal(
            got[:, group * 6 : group * 6 + 6], linear_dense(o[:, group].contiguous(), weight[group])
        )
    assert torch.equal(grouped_output(o, weight.double()), got)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_pooling_weighs_tokens_per_channel(m: int) -> None:
    g = torch.Generator().manual_seed(m)
    kv, gate = torch.randn(9, m, 32, generator=g), torch.randn(9, m, 32, generator=g) * 4
    p = torch.exp(gate.double()) / torch.exp(gate.double()).sum(1, keepdim=True)
    got = pool_groups(kv, gate)
    torch.testing.assert_close(got.double(), (p * kv.double()).sum(1), rtol=2**-8, atol=1e-6)
    assert pool_groups(kv[:0], gate[:0]).shape == (0, 32)
    if m == 1:
        assert torch.equal(got, kv[:, 0].bfloat16())


def test_entries_keep_rope_out_of_the_index_key_path() -> None:
    pooled, norm, key_norm = random(8, 64, seed=12), random(64, seed=13, scale=0.1), random(32, seed=14)
    wk, freqs, positions = random(32, 64, seed=15), rope_frequencies(16, 1e4), torch.arange(8) * 2
    entries = compress_entries(pooled, norm, wk, key_norm, positions, freqs, 1e-20)
    latent = rms_norm(pooled, norm, 1e-20)
    key = rms_norm(linear_dense(latent, wk), key_norm, 1e-20)
    wanted = (
        *pack_fp4_e4m3(apply_rope(latent, positions, freqs)),
        *pack_fp4_e8m0(apply_rope(key, positions, freqs)),
    )
    for got, want in zip(entries, wanted, strict=True):
        assert torch.equal(got, want)
