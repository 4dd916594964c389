# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""MXFP4 weights times activations in two bands, through Hopper's FP8 matrix units: operands and layouts.

E2M1 lies inside E4M3, so a weight becomes an operand by moving bits, seven instructions for eight of them
(nineteen to bf16 with its scale), and activations are E4M3 anyway. A step of the product takes 32 channels,
just one scale group: its sum stands alone, and fp32 multiplies it by both scales and adds.

Hopper keeps some 14 bits of such a sum. Therefore activations may be split into two bands, `COARSE` and above
and below it, which are columns of their own: sums of coarse values have few bits, and what the fine ones lose
is 2^-14 of a hundredth. In one band a product is right to 5e-5. That is much for rows that are quantised
again: one value in a thousand is rounded the other way, and the experts' output differs by 2e-3.

In a group even channels come first, as low nibbles come before high ones. `quantise` writes activations so:
uint8 [N, 2, channels], the coarse band and the fine one, and fp32 [N, channels / 32], scales times 2^6
(weights are 2^-6 of their value here); `prepared_triton.store_bands` is the same for a Triton kernel's rows.
"""

from __future__ import annotations

import torch
from cedar.kernels.grid_hopper import grid_release, grid_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COARSE = gl.constexpr(0x58)  # E4M3 of 16

# Four bytes (eight channels) to four E4M3 of the lower and four of the upper nibbles: value·2^-6.
_ASM = gl.constexpr("""
{
.reg .b32 a, b, c;
shr.b32 a, $2, 2;
and.b32 a, a, 0x1C1C1C1C;
lop3.b32 $1, $2, 0x80808080, a, 0xEA;
shl.b32 b, $2, 4;
shl.b32 c, $2, 2;
and.b32 c, c, 0x1C1C1C1C;
lop3.b32 $0, b, 0x80808080, c, 0xEA;
}
""")

SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))
SHARED_W = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_GROUPS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # [8 groups, 32 channels]
LANES = [[1, 0], [2, 0], [4, 0]]
WARPS = [[16, 0], [32, 0]]


# E4M3 bytes of 64 rows, 128 channels: a thread has eight of each group of two rows.
_RAW8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], *LANES], WARPS, [], [64, 128]
    )
)


@gluon.constexpr_function
def raw4(groups):
    """E2M1 bytes of 64 rows, 32 channels a group: a thread has four of each group of two rows."""
    more = [[0, 16 << i] for i in range(groups.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *more, [8, 0]], [[0, 4], [0, 8], *LANES], WARPS, [], [64, 16 * groups]
    )


@gluon.constexpr_function
def copy_scales(groups):
    """Bytes [64, groups], a row a thread."""
    return gl.BlockedLayout([1, groups], [32, 1], [4, 1], [1, 0])


@gluon.jit
def code_of(amax):
    """The scale's E8M0 byte of a group's greatest magnitude, as in `fp8_ref`."""
    return ((gl.maximum(amax, 1e-4) * 0.002232142857142857).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23


@gluon.jit
def to_bytes(x, code):
    """fp32 x with the scale of `code` as E4M3 bytes."""
    down = ((254 - code) << 23).to(gl.float32, bitcast=True)
    return gl.minimum(gl.maximum(x * down, -448.0), 448.0).to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.jit
def scale_of(code):
    """What a sum with these activations is multiplied by, besides the weights' scale."""
    return (code << 23).to(gl.float32, bitcast=True) * 64.0


@gluon.jit
def bands(q):
    """E4M3 bytes as (coarse, fine): zeros where a value belongs to the other."""
    coarse = (q & 0x7F) >= COARSE
    return gl.where(coarse, q, 0).to(gl.uint8), gl.where(coarse, 0, q).to(gl.uint8)


@gluon.jit
def operands(raw, GROUPS: gl.constexpr):
    """E4M3·2^-6 of bytes [64, 16 GROUPS]: [64, GROUPS, even or odd, 16]."""
    low, high = gl.inline_asm_elementwise(
        _ASM, "=r,=r,r", [raw], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )
    return gl.permute(gl.reshape(gl.join(low, high), [64, GROUPS, 16, 2]), (0, 1, 3, 2))


@gluon.jit
def quantise(x_ptr, out_ptr, scale_ptr, columns, x_stride):
    """Grid (tokens, columns / 256)."""
    grid_wait()
    grid_release()
    token = gl.program_id(0).to(gl.int64)
    block = gl.program_id(1)
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, _GROUPS))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, _GROUPS))
    at = block * 256 + g[:, None] * 32 + c[None, :]
    x = gl.load(x_ptr + token * x_stride + at).to(gl.float32)
    code = code_of(gl.max(gl.abs(x), axis=1))
    q = gl.reshape(gl.permute(gl.reshape(to_bytes(x, code[:, None]), [8, 16, 2]), (0, 2, 1)), [8, 32])
    coarse, fine = bands(gl.convert_layout(q, _GROUPS))
    out = out_ptr + token * 2 * columns + at
    gl.store(out, coarse)
    gl.store(out + columns, fine)
    gl.store(scale_ptr + token * (columns // 32) + block * 8 + g, scale_of(code))


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [N, C] as (bands uint8 [N, 2, C], scales fp32 [N, C / 32]); C a multiple of 256."""
    tokens, width = x.shape
    out = torch.empty(tokens, 2, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, width // 32, dtype=torch.float32, device=x.device)
    quantise[(tokens, width // 256)](x, out, scales, width, x.stride(0), num_warps=4, launch_pdl=True)
    return out, scales
