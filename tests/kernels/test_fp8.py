"""FP8 quantisation against its definition, written again with exact arithmetic over every code (spec §4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cedar.kernels.fp8 import (
    dequantize_fp8,
    expand_fp8_blocks,
    pack_window_rows,
    quantize_fp8,
    unpack_window_rows,
)

POSITIVE_BF16 = (
    torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
)  # 0 and every finite


def e4m3_values() -> np.ndarray:
    """float64 [127]: every non-negative E4M3 value, by code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))


def nearest_code(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the nearest value to each |x|, ties to the even code; distances are exact in float64."""
    distance = np.abs(np.abs(x)[:, None] - values[None, :])
    least = distance == distance.min(1, keepdims=True)
    even = least & (np.arange(len(values)) % 2 == 0)
    return np.where(even.any(1), even.argmax(1), least.argmax(1))


def slow_scale_code(amax: np.ndarray, divisor: float, floor: float) -> np.ndarray:
    ratio = np.maximum(amax, np.float32(floor)).astype(np.float32) * np.float32(1.0 / divisor)
    mantissa, exponent = np.frexp(
        ratio.astype(np.float64)
    )  # ratio = mantissa * 2^exponent, mantissa in [1/2, 1)
    return np.where(mantissa == 0.5, exponent - 1, exponent) + 127


def test_scale_of_every_amax() -> None:
    x = torch.zeros(len(POSITIVE_BF16), 32, dtype=torch.bfloat16)
    x[:, 7] = -POSITIVE_BF16
    _, scale = quantize_fp8(x)
    wanted = slow_scale_code(POSITIVE_BF16.float().numpy(), 448.0, 1e-4)
    assert np.array_equal(scale[:, 0].numpy(), wanted)
    assert wanted[0] == 127 - 22  # the floor
    assert wanted[-1] < 255


@pytest.mark.parametrize("anchor", [1.0, 447.0, 448.0, 3e38, 1e-4, 1e-30, 5.5])
def test_every_value_under_a_scale_rounds_to_the_nearest_even_code(anchor: float) -> None:
    anchor_bf16 = torch.tensor(anchor).bfloat16()
    below = POSITIVE_BF16[anchor_bf16 >= POSITIVE_BF16]
    below = torch.cat((below, -below))
    below = torch.cat((below, below.new_zeros(-len(below) % 31))).view(-1, 31)
    x = torch.cat((anchor_bf16.expand(len(below), 1), below), 1)
    q, scale = quantize_fp8(x)
    code = slow_scale_code(np.array([float(anchor_bf16)], np.float32), 448.0, 1e-4)[0]
    assert (scale == int(code)).all()
    scaled = np.clip(np.ldexp(x.double().numpy().ravel(), 127 - int(code)), -448, 448)
    got = q.view(torch.uint8).numpy().ravel()
    assert np.array_equal(got & 127, nearest_code(scaled, e4m3_values()))
    assert np.array_equal(got >> 7, np.signbit(scaled))


def test_round_trip_is_idempotent_and_keeps_codes() -> None:
    x = (torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    once = dequantize_fp8(*quantize_fp8(x))
    assert torch.equal(dequantize_fp8(*quantize_fp8(once)), once)
    assert (once - x).abs().float().max() <= x.abs().float().max() / 16


def test_dequantize_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = codes[(codes & 127) != 127]
    values = np.concatenate((e4m3_values(), -e4m3_values()))
    for scale in (0, 1, 100, 127, 200, 245):
        q = torch.cat((finite, finite[:2])).view(8, 32).view(torch.float8_e4m3fn)
        got = dequantize_fp8(q, torch.full((8, 1), scale, dtype=torch.uint8)).flatten()[:254]
        wanted = torch.from_numpy(np.ldexp(values, scale - 127)).to(torch.bfloat16)
        assert torch.equal(got, wanted), scale
    assert dequantize_fp8(q, torch.full((8, 1), 255, dtype=torch.uint8)).isnan().all()


def test_published_vector() -> None:
    weight = torch.frombuffer(bytearray.fromhex("d871f2797069f0e5"), dtype=torch.uint8).view(1, 8)
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    got = expand_fp8_blocks(weight.view(torch.float8_e4m3fn), scale, torch.float64)
    wanted = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert got.tolist() == [wanted]


def test_window_rows_hold_payload_then_scales() -> None:
    k = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = pack_window_rows(k)
    q, scale = quantize_fp8(k)
    assert rows.shape == (5, 66)
    assert torch.equal(rows[:, :64], q.view(torch.uint8))
    assert torch.equal(rows[:, 64:], scale)
    assert torch.equal(unpack_window_rows(rows, 64), dequantize_fp8(q, scale))
    assert pack_window_rows(k[:0]).shape == (0, 66)


def test_expand_blocks_with_ragged_edges() -> None:
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(70, 33, generator=g).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 140, (3, 2), generator=g, dtype=torch.uint8)
    got = expand_fp8_blocks(weight, scale, torch.float64)
    for row, column in ((0, 0), (31, 32), (32, 31), (69, 32), (64, 0)):
        wanted = float(weight[row, column].float()) * 2.0 ** (int(scale[row // 32, column // 32]) - 127)
        assert float(got[row, column]) == wanted
