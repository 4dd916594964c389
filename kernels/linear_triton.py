# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products on a GPU.

`linear_hopper` has the FP8 products and `weights_hopper` the bf16 ones of few tokens on Hopper; elsewhere
they are a library's, on weights expanded for the call.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from cedar.kernels.packed_triton import INTERPRETED, e2m1, exponent_value, fp8_round_trip, to_bf16
from cedar.kernels.prepared import CODES, Prepared

NATURAL, FOR_FP8, FOR_FP4 = 0, 1, 2  # channel orders of `permuted`
WIDE = 4  # added to an order: as `weights_hopper`'s wgmma kernels meet it
GROUPED = 16  # as `linear_bulk_hopper` meets it: every 32 channels stay together


@triton.jit
def _permuted(x_ptr, out_ptr, columns, ORDER: tl.constexpr, B: tl.constexpr):
    """Grid (rows, ceil(columns / B))."""
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.program_id(1) * B + tl.arange(0, B)
    source = at
    if ORDER % 4 == 1:  # bytes 1, 3, 0, 2 of every four
        source = at - at % 4 + (1 - (at % 4) // 2) + 2 * (at % 2)
    elif ORDER % 4 == 2:  # nibbles 3, 7, 2, 6, 1, 5, 0, 4 of every eight
        source = at - at % 8 + (3 - (at % 8) // 2) + 4 * (at % 2)
    target = at
    if ORDER == 16:  # a thread's eight of 32 channels, two here and two there of every sixteen
        m = at % 32
        target = at - m + (m % 8 // 4) * 16 + (m // 2 % 2) * 8 + (m // 8) * 2 + m % 2
    elif ORDER >= 4:  # a thread's 32 channels, two here and two there of every sixteen
        m = at % 128
        target = at - m + (m % 32 // 4) * 16 + (m // 2 % 2) * 8 + (m // 32) * 2 + m % 2
    x = tl.load(x_ptr + row + source, mask=at < columns, other=0.0).to(tl.float32)
    x = tl.reshape(fp8_round_trip(tl.reshape(x, [1, B]), B // 32), [B])
    tl.store(out_ptr + row + target, to_bf16(x), mask=at < columns)


def permuted(x: torch.Tensor, order: int = NATURAL) -> torch.Tensor:
    """What a matmul sees of x bf16 [N, I] (quantised, read back), its channels in the order that packed
    weights meet them.
    """
    rows, columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        block = min(2048, max(32, triton.next_power_of_2(columns)))
        _permuted[(rows, triton.cdiv(columns, block))](x.contiguous(), out, columns, order, block)
    return out


@triton.jit
def _expand(weight_ptr, scale_ptr, out_ptr, columns, scale_columns, B: tl.constexpr):
    """Grid (rows, ceil(columns / B)): E4M3 with 32x32 scales to bf16."""
    row = tl.program_id(0)
    at = tl.program_id(1) * B + tl.arange(0, B)
    value = tl.load(weight_ptr + row.to(tl.int64) * columns + at, mask=at < columns, other=0)
    code = tl.load(
        scale_ptr + (row // 32).to(tl.int64) * scale_columns + at // 32, mask=at < columns, other=127
    )
    value = value.to(tl.float8e4nv, bitcast=True).to(tl.float32) * exponent_value(code)
    tl.store(out_ptr + row.to(tl.int64) * columns + at, to_bf16(value), mask=at < columns)


def expand_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 [O, I] of E4M3 [O, I] with one E8M0 byte per 32x32 block."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    block = min(1024, triton.next_power_of_2(columns))
    _expand[(rows, triton.cdiv(columns, block))](
        weight.contiguous().view(torch.uint8), scale.contiguous(), out, columns, scale.shape[1], block
    )
    return out


@triton.jit
def packed_rows(
    x_ptr, slots_ptr, experts_ptr, weight_ptr, scale_ptr, out_ptr, columns, outputs, scale_columns, k,
    FP4: tl.constexpr, T: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(outputs / BO), tiles): W[expert]·x of T slots a tile, any shape; x natural and already
    quantised.

    Slot s (negative: none) reads row s // k of x and writes row s of out bf16.
    """
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    slot = tl.load(slots_ptr + tile * T + tl.arange(0, T))
    row = tl.program_id(0) * BO + tl.arange(0, BO)
    inside = (row < outputs)[:, None]
    acc = tl.zeros([BO, T], tl.float32)
    if expert >= 0:
        base = (expert.to(tl.int64) * outputs + row)[:, None]
        source = (tl.maximum(slot, 0) // k).to(tl.int64)[:, None] * columns
        for start in range(0, columns, BK):
            if FP4:
                pair = start // 2 + tl.arange(0, BK // 2)
                fits = (2 * pair < columns)[None, :]
                byte = tl.load(
                    weight_ptr + base * (columns // 2) + pair[None, :], mask=inside & fits, other=0
                ).to(tl.int32)
                code = tl.load(
                    scale_ptr + base * scale_columns + pair[None, :] // 16, mask=inside & fits, other=127
                )
                factor = exponent_value(code)
                even = tl.load(
                    x_ptr + source + 2 * pair[None, :], mask=(slot >= 0)[:, None] & fits, other=0.0
                )
                odd = tl.load(
                    x_ptr + source + 2 * pair[None, :] + 1, mask=(slot >= 0)[:, None] & fits, other=0.0
                )
                acc += _wide_dot(e2m1(byte & 15) * factor, even)
                acc += _wide_dot(e2m1(byte >> 4) * factor, odd)
            else:
                at = start + tl.arange(0, BK)
                fits = (at < columns)[None, :]
                byte = tl.load(weight_ptr + base * columns + at[None, :], mask=inside & fits, other=0)
                code = tl.load(
                    scale_ptr + (base // 32) * scale_columns + at[None, :] // 32,
                    mask=inside & fits,
                    other=127,
                )
                value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * exponent_value(code)
                x = tl.load(x_ptr + source + at[None, :], mask=(slot >= 0)[:, None] & fits, other=0.0)
                acc += _wide_dot(value, x)
        target = out_ptr + tl.maximum(slot, 0)[None, :].to(tl.int64) * outputs + row[:, None]
        tl.store(target, to_bf16(acc), mask=inside & (slot >= 0)[None, :])


@triton.jit
def _wide_dot(weight, x):
    """weight [BO, K] fp32 (exact in bf16) times x [T, K] bf16, transposed."""
    if INTERPRETED:
        out = tl.dot(weight, tl.trans(x.to(tl.float32)), input_precision="ieee")
    else:
        out = tl.dot(weight.to(tl.bfloat16), tl.trans(x))
    return out


LEAST_MULTIPROCESSORS = 64


@cache
def hopper(index: int) -> bool:
    """Whether CUDA device `index` is Hopper with enough multiprocessors for kernels whose programs wait for
    one another: a part of a card has its own, fewer, and they would wait for ever.
    """
    return (
        torch.cuda.get_device_capability(index) == (9, 0) and multiprocessors(index) >= LEAST_MULTIPROCESSORS
    )


@cache
def multiprocessors(index: int) -> int:
    """Of CUDA device `index`, which may be a part of a card."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _zeros(index: int) -> torch.Tensor:
    """Counters that every call leaves at zero."""
    return torch.zeros(65_536, dtype=torch.int32, device=f"cuda:{index}")


def _few(
    x: torch.Tensor, weight: torch.Tensor, outputs: int, columns: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Launches `weights_hopper.linear_rows`."""
    from cedar.kernels.weights_hopper import linear_rows

    tokens = x.shape[0]
    together = 8 if tokens <= 8 else 16
    tiles = triton.cdiv(outputs, 64)
    wide = triton.cdiv(tokens, together)
    blocks = columns // 128
    splits = max(1, min(blocks // 2, 396 // (tiles * wide)))
    out = torch.empty(tokens, outputs, dtype=out_dtype, device=x.device)
    part = torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device) if splits > 1 else out
    linear_rows[(tiles, wide, splits)](
        x, weight, out, part, _zeros(x.device.index or 0), tokens, outputs, x.stride(0),
        columns, together, splits, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def order_for(tokens: int, weight: torch.Tensor) -> int | None:
    """As the public function, for a CUDA weight."""
    if not hopper(weight.device.index or 0) or not weight.is_contiguous():
        return None
    from cedar.kernels import linear_hopper

    cut = linear_hopper.plan(tokens, *weight.shape)
    if cut is None:
        return None
    return GROUPED if isinstance(cut, linear_hopper.Bulk) else CODES


def settles(tokens: int, weight: torch.Tensor) -> bool:
    """As the public function, for a CUDA weight."""
    if not hopper(weight.device.index or 0):
        return True
    from cedar.kernels import linear_hopper

    return linear_hopper.waits_first(linear_hopper.plan(tokens, *weight.shape))


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, prepared: tuple[Prepared, ...] = ()
) -> torch.Tensor:
    """bf16 [..., O]: x bf16 [..., I] quantised, times E4M3 [O, I] with 32x32 scales."""
    outputs, columns = weight.shape
    flat = x.reshape(-1, columns)
    if flat.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], outputs)
    cut = None
    if x.is_cuda and hopper(x.device.index or 0) and weight.is_contiguous() and scale.is_contiguous():
        from cedar.kernels import linear_hopper

        cut = linear_hopper.plan(flat.shape[0], outputs, columns)
    if cut is not None:
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        out = linear_hopper.linear_fp8(flat, weight, scale, cut, prepared)
    elif x.is_cuda:
        out = permuted(flat) @ expand_blocks(weight, scale).T
    else:
        out = _portable_fp8(flat, weight, scale)
    return out.view(*x.shape[:-1], outputs)


def _portable_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    tokens, columns = x.shape
    outputs = weight.shape[0]
    tiles = triton.cdiv(tokens, 16)
    slots = torch.arange(tiles * 16, dtype=torch.int32, device=x.device)
    slots.masked_fill_(slots >= tokens, -1)
    experts = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x.device)
    packed_rows[(triton.cdiv(outputs, 32), tiles)](
        permuted(x), slots, experts, weight.contiguous().view(torch.uint8), scale.contiguous(), out,
        columns, outputs, scale.shape[1], 1, False, 16, 32, 64,
    )  # fmt: skip
    return out


def linear_bf16(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """[..., O] in `out_dtype` of bf16 x [..., I] and weight [O, I], fp32 sums."""
    outputs, columns = weight.shape
    flat = x.reshape(-1, columns)
    fits = columns % 128 == 0 and weight.is_contiguous() and flat.is_contiguous()
    if 0 < flat.shape[0] <= 16 and fits and hopper(x.device.index or 0):
        out = _few(flat, weight, outputs, columns, out_dtype)
    elif out_dtype == torch.bfloat16:
        out = flat @ weight.T
    else:
        out = torch.mm(flat, weight.T, out_dtype=torch.float32).to(out_dtype)
    return out.view(*x.shape[:-1], outputs)


def grouped_output(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 [N, G·r]: o bf16 [N, G, C] times weight bf16 [G, r, C] per group: a library product, in place."""
    tokens, groups, _ = o.shape
    out = torch.empty(tokens, groups, weight.shape[1], dtype=torch.bfloat16, device=o.device)
    torch.bmm(o.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(tokens, -1)
