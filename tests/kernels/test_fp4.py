"""FP4 packing against its definition, written again over every code, tie and scale (spec §4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cedar.kernels.experts import expand_experts
from cedar.kernels.fp4 import pack_fp4_e4m3, pack_fp4_e8m0, unpack_fp4_e4m3, unpack_fp4_e8m0

from .test_fp8 import POSITIVE_BF16, e4m3_values, nearest_code, slow_scale_code

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def slow_e4m3_scale(amax: np.ndarray) -> np.ndarray:
    """E4M3 codes of the scales of groups with these amax."""
    floored = np.maximum(amax.astype(np.float32), np.float32(6 * 2.0**-9))
    ratio = np.minimum(floored / np.float32(6), np.float32(448)).astype(np.float64)
    return nearest_code(ratio, e4m3_values())


def slow_codes(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        scaled = np.clip(x.astype(np.float32) / scale.astype(np.float32), np.float32(-6), np.float32(6))
    return nearest_code(scaled.astype(np.float64), MAGNITUDES) | (np.signbit(scaled) << 3)


def nibbles(payload: torch.Tensor) -> np.ndarray:
    """Codes [..., C], even channels from the low nibbles."""
    bytes_ = payload.numpy()
    return np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(*bytes_.shape[:-1], -1)


def groups_with_amax(values: torch.Tensor, size: int) -> torch.Tensor:
    """bf16 [len, size]: each group has its value once, negative, beside fractions of it that meet ties."""
    fractions = torch.tensor(
        [1, 5 / 6, 7 / 12, 5 / 12, 7 / 24, 5 / 24, 1 / 8, 1 / 24, 0, 0.3, 0.9, 0.04, 0.5, 0.7, 0.11, 0.6]
    )
    signs = torch.tensor([-1.0, 1.0]).repeat(8)
    return (values.float().unsqueeze(1) * (fractions * signs).repeat(size // 16)).bfloat16()


def test_e4m3_pack_of_every_amax() -> None:
    x = groups_with_amax(POSITIVE_BF16, 16)
    payload, scales = pack_fp4_e4m3(x)
    amax = x.abs().amax(1).float().numpy()
    code = slow_e4m3_scale(amax)
    assert np.array_equal(scales[:, 0].numpy(), code)
    scale = np.repeat(e4m3_values()[code], 16)
    assert np.array_equal(nibbles(payload).ravel(), slow_codes(x.float().numpy().ravel(), scale))
    assert code.min() == 1  # the floor: the least subnormal, never zero
    assert code.max() == 126  # 448, the ceiling


def test_e8m0_pack_of_every_amax() -> None:
    x = groups_with_amax(POSITIVE_BF16, 32)
    payload, scales = pack_fp4_e8m0(x)
    code = slow_scale_code(x.abs().amax(1).float().numpy(), 6.0, 6 * 2.0**-126)
    assert np.array_equal(scales[:, 0].numpy(), code)
    scale = np.repeat(np.ldexp(1.0, code - 127), 32)
    assert np.array_equal(nibbles(payload).ravel(), slow_codes(x.float().numpy().ravel(), scale))
    assert code.min() == 1  # the floor, 2^-126


def test_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = torch.tensor([[6.0, *ties, *(-t for t in ties), 0.0]]).bfloat16()
    assert unpack_fp4_e4m3(*pack_fp4_e4m3(x))[0].tolist() == [6.0, *wanted, *(-w for w in wanted), 0.0]
    wide = torch.cat((x, x), 1)
    assert unpack_fp4_e8m0(*pack_fp4_e8m0(wide))[0].tolist() == [6.0, *wanted, *(-w for w in wanted), 0.0] * 2


@pytest.mark.parametrize("pack", [pack_fp4_e4m3, pack_fp4_e8m0])
def test_even_channel_in_the_low_nibble_and_signs_kept(pack: object) -> None:
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, -3.0, -0.0
    payload, _ = pack(x)  # type: ignore[operator]
    assert payload[0, :2].tolist() == [0x07 | 0xD0, 0x08]


@pytest.mark.parametrize(
    ("pack", "unpack", "channels"),
    [(pack_fp4_e4m3, unpack_fp4_e4m3, 48), (pack_fp4_e8m0, unpack_fp4_e8m0, 96)],
)
def test_round_trip_is_idempotent(pack: object, unpack: object, channels: int) -> None:
    x = torch.randn(3, 50, channels, generator=torch.Generator().manual_seed(4)).bfloat16()
    once = unpack(*pack(x))  # type: ignore[operator]
    assert once.shape == x.shape
    assert torch.equal(unpack(*pack(once)), once)  # type: ignore[operator]
    assert (once - x).float().abs().max() <= x.float().abs().max() / 6 + 1e-6


def test_unpack_every_byte_under_every_finite_scale() -> None:
    payload = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    low, high = payload.numpy() & 15, payload.numpy() >> 4
    values = np.concatenate((MAGNITUDES, -MAGNITUDES))[np.stack((low, high), -1).ravel()]
    for code in (0, 1, 126, 127, 128, 252):
        got = unpack_fp4_e8m0(payload.view(1, -1), torch.full((1, 16), code, dtype=torch.uint8))
        assert torch.equal(got[0].double(), torch.from_numpy(np.ldexp(values, code - 127))), code
    for code in range(127):
        got = unpack_fp4_e4m3(payload.view(1, -1), torch.full((1, 32), code, dtype=torch.uint8))
        assert torch.equal(got[0].double(), torch.from_numpy(values * e4m3_values()[code])), code


def test_published_vector() -> None:
    payload = torch.frombuffer(bytearray.fromhex("a0a8ec4aadaf42aa"), dtype=torch.uint8).clone()
    payload = torch.cat((payload, payload.new_zeros(8))).view(1, 1, 16)
    got = expand_experts(payload, torch.tensor([[[0x78]]], dtype=torch.uint8))[0, 0, :16]
    wanted = [0, -0.0078125, -0.0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625]
    wanted += [-0.0234375, -0.0078125, -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125]
    assert got.tolist() == wanted
    assert torch.signbit(got[2])


def test_strided_input_packs_alike() -> None:
    wide = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = wide[::2, 1:3, 16:48]
    for pack in (pack_fp4_e4m3, pack_fp4_e8m0):
        for got, wanted in zip(pack(x), pack(x.contiguous()), strict=True):
            assert torch.equal(got, wanted)
