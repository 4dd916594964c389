# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The packed formats inside Triton kernels: FP4, FP8 and their scales, read and written (spec §4).

Reading: `fp4_pairs` and `fp8_values` give exact bf16. On a GPU they are a few instructions for four bytes
(`prmt`, `lop3`,
one packed multiply); Triton's interpreter runs the same arithmetic on plain integers. The scale handed in
is the stored
one times 2^-lift, so that no product leaves bf16's range; the caller multiplies its sum by 2^lift.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Four bytes and four bf16 scales (times 2^126) to four even and four odd E2M1 channels.
_FP4_BF16 = tl.constexpr("""
{
.reg .b32 t0, t1, a0, a1, b0, b1, c;
prmt.b32 t0, $4, 0, 0x1404;
prmt.b32 t1, $4, 0, 0x3424;
shr.b32 a0, t0, 6;
shr.b32 a1, t1, 6;
and.b32 a0, a0, 0x01C001C0;
and.b32 a1, a1, 0x01C001C0;
lop3.b32 a0, t0, 0x80008000, a0, 0xEA;
lop3.b32 a1, t1, 0x80008000, a1, 0xEA;
mul.rn.bf16x2 $2, a0, $5;
mul.rn.bf16x2 $3, a1, $6;
shr.b32 b0, t0, 2;
shr.b32 b1, t1, 2;
and.b32 b0, b0, 0x01C001C0;
and.b32 b1, b1, 0x01C001C0;
shl.b32 c, t0, 4;
lop3.b32 b0, c, 0x80008000, b0, 0xEA;
shl.b32 c, t1, 4;
lop3.b32 b1, c, 0x80008000, b1, 0xEA;
mul.rn.bf16x2 $0, b0, $5;
mul.rn.bf16x2 $1, b1, $6;
}
""")

# Four E4M3 bytes and four bf16 scales (times 2^120) to four channels.
_FP8_BF16 = tl.constexpr("""
{
.reg .b32 t0, t1, a0, a1;
prmt.b32 t0, $2, 0, 0x1404;
prmt.b32 t1, $2, 0, 0x3424;
shr.b32 a0, t0, 4;
shr.b32 a1, t1, 4;
and.b32 a0, a0, 0x07F007F0;
and.b32 a1, a1, 0x07F007F0;
lop3.b32 a0, t0, 0x80008000, a0, 0xEA;
lop3.b32 a1, t1, 0x80008000, a1, 0xEA;
mul.rn.bf16x2 $0, a0, $3;
mul.rn.bf16x2 $1, a1, $4;
}
""")


@triton.jit
def to_bf16(x):
    """Fp32 rounded to nearest even as bf16 (the interpreter's own cast truncates)."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(tl.bfloat16)
    return out


@triton.jit
def bf16_round(x):
    """Fp32 holding x rounded to bf16."""
    return to_bf16(x).to(tl.float32)


@triton.jit
def to_e4m3(x):
    """Fp32 within ±448 rounded to nearest even as E4M3."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        small = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)  # an ulp of 2^-9
        small = (small | (bits & -2147483648)).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, small, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def power_of_two(code, shift):
    """bf16 2^(code - 127 + shift) of E8M0 bytes (any shape); 0 below bf16's normal range, its largest
    power above it.
    """
    exponent = code.to(tl.int32) + shift
    exponent = tl.where(exponent < 1, 0, tl.minimum(exponent, 254))
    return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def exponent_value(code):
    """Fp32 2^(code-127) of E8M0 bytes; 0 is 2^-127, 255 is NaN."""
    bits = code.to(tl.int32) << 23
    bits = tl.where(code.to(tl.int32) == 0, 0x00400000, bits)
    return tl.where(code.to(tl.int32) == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(nibble):
    """Fp32 values of E2M1 codes 0 to 15, int32."""
    bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)  # fp16 of the value times 2^-14
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def fp4_pairs(packed, scale):
    """(even, odd) bf16 channels of bytes uint8; scale bf16 of the same shape, 2^126 times what multiplies
    the values.
    """
    if INTERPRETED:
        byte = packed.to(tl.int32)
        factor = scale.to(tl.float32)
        small: tl.constexpr = 1.1754943508222875e-38  # 2^-126
        even = to_bf16(e2m1(byte & 15) * small * factor)
        odd = to_bf16(e2m1(byte >> 4) * small * factor)
    else:
        even, odd = tl.inline_asm_elementwise(
            _FP4_BF16,
            "=r,=r,=r,=r,r,r,r",
            [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return even, odd


@triton.jit
def fp8_values(stored, scale):
    """bf16 channels of E4M3 bytes uint8; scale bf16 of the same shape, 2^120 times what multiplies the
    values.
    """
    if INTERPRETED:
        value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        small: tl.constexpr = 7.52316384526264e-37  # 2^-120
        out = to_bf16(value * small * scale.to(tl.float32))
    else:
        out = tl.inline_asm_elementwise(
            _FP8_BF16, "=r,=r,r,r,r", [stored, scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return out


@triton.jit
def multiply_halves(a, b):
    """Products, two fp16 a word, of int32 words of two fp16; each rounded once, subnormals kept."""
    if INTERPRETED:
        low = _half_value(a) * _half_value(b)
        high = _half_value(a >> 16) * _half_value(b >> 16)
        low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        out = low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        out = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return out


@triton.jit
def _half_value(bits):
    """Fp32 value of the fp16 in the lower half of int32 words."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def wide_window(low, high, code):
    """Words of two window channels as fp16 of value·2^-7, of their E4M3 bytes and their group's E8M0 byte,
    int32 of one shape; as attention on a Hopper expands them (`wide_keys_ref.expand_window`).
    """
    normal = (tl.minimum(code, 141) - 111) << 10
    small = tl.where(code >= 102, 1 << (tl.maximum(code, 102) - 102), 0)
    power = tl.where(code >= 112, normal, small) * 0x00010001
    byte = low | (high << 16)
    return multiply_halves(((byte & 0x007F007F) << 7) | ((byte & 0x00800080) << 8), power)


@triton.jit
def matmul(a, b, acc):
    """acc + a·b of bf16 operands, fp32; the interpreter needs them widened."""
    if INTERPRETED:
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def ceil_power(ratio):
    """E8M0 code, int32, of the smallest power of two at or above `ratio` (fp32, positive)."""
    return (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def encode_e2m1(scaled):
    """E2M1 codes int32 of fp32 values within ±6, nearest even."""
    size = tl.abs(scaled)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5) + (size > 5.0)
    return code | ((scaled.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def pack_fp4_e4m3(even, odd, GROUPS: tl.constexpr):
    """Packs fp32 channels (even, odd) [R, GROUPS·8]: payload uint8 of that shape, E4M3 scale bytes [R,
    GROUPS].
    """
    rows: tl.constexpr = even.shape[0]
    size = tl.maximum(tl.abs(even), tl.abs(odd))
    amax = tl.max(tl.reshape(size, [rows, GROUPS, 8]), axis=2)
    amax = tl.maximum(amax, 0.01171875)  # 6·2^-9
    scale = to_e4m3(tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0))
    wide = tl.reshape(
        tl.broadcast_to(scale.to(tl.float32)[:, :, None], [rows, GROUPS, 8]), [rows, GROUPS * 8]
    )
    low = encode_e2m1(tl.clamp(tl.div_rn(even, wide), -6.0, 6.0))
    high = encode_e2m1(tl.clamp(tl.div_rn(odd, wide), -6.0, 6.0))
    return (low | (high << 4)).to(tl.uint8), scale.to(tl.uint8, bitcast=True)


@triton.jit
def pack_fp4_e8m0(even, odd, GROUPS: tl.constexpr):
    """The same with power-of-two scales over 32 channels: channels [R, GROUPS·16], scale bytes [R,
    GROUPS].
    """
    rows: tl.constexpr = even.shape[0]
    size = tl.maximum(tl.abs(even), tl.abs(odd))
    amax = tl.maximum(tl.max(tl.reshape(size, [rows, GROUPS, 16]), axis=2), 7.052966104933725e-38)  # 6·2^-126
    code = ceil_power(amax * 0.16666667163372040)  # fp32(1/6)
    inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
    wide = tl.reshape(tl.broadcast_to(inverse[:, :, None], [rows, GROUPS, 16]), [rows, GROUPS * 16])
    low = encode_e2m1(tl.clamp(even * wide, -6.0, 6.0))
    high = encode_e2m1(tl.clamp(odd * wide, -6.0, 6.0))
    return (low | (high << 4)).to(tl.uint8), code.to(tl.uint8)


@triton.jit
def fp8_scale(amax):
    """E8M0 code int32 of FP8 groups whose greatest magnitude is amax, fp32."""
    return ceil_power(tl.maximum(amax, 1e-4) * 0.002232142857142857)  # fp32(1/448)


@triton.jit
def fp8_round_trip(x, GROUPS: tl.constexpr):
    """What a matmul sees of activations fp32 [R, GROUPS·32] holding bf16 values: quantised and read back,
    fp32.
    """
    rows: tl.constexpr = x.shape[0]
    code = fp8_scale(tl.max(tl.reshape(tl.abs(x), [rows, GROUPS, 32]), axis=2))
    up = tl.reshape(
        tl.broadcast_to((code << 23).to(tl.float32, bitcast=True)[:, :, None], [rows, GROUPS, 32]), x.shape
    )
    down = tl.reshape(
        tl.broadcast_to(((254 - code) << 23).to(tl.float32, bitcast=True)[:, :, None], [rows, GROUPS, 32]),
        x.shape,
    )
    return to_e4m3(tl.clamp(x * down, -448.0, 448.0)).to(tl.float32) * up
