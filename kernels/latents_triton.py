# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The norms of attention's latents on a GPU, one launch: query rows, key rows and copied ring rows are
programs of their own. The program that replaces a ring row copies the old one first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.latents import Staging
from cedar.kernels.linear_triton import hopper
from cedar.kernels.move_rows_triton import copy_row
from cedar.kernels.packed_triton import bf16_round, fp8_scale, to_bf16, to_e4m3, wide_window
from cedar.kernels.prepared import CODES, Prepared, empty_codes
from cedar.kernels.prepared_triton import store_codes, store_prepared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NONE = -1
_CODES = tl.constexpr(CODES)


@triton.jit
def _store(out_ptr, scale_ptr, x, channel, inside, ORDER: tl.constexpr, B: tl.constexpr):
    """A row's copy in an order, unless that is NONE."""
    if ORDER == _CODES:
        store_codes(out_ptr, scale_ptr, x, channel, inside, B)
    elif ORDER >= 0:
        store_prepared(out_ptr, x, channel, inside, ORDER, B)


@triton.jit
def _widen_row(from_ptr, source, from_rows, wide_ptr, target, to_rows, HALF: tl.constexpr):
    """What `copy_row` copies of a ring, expanded."""
    if (source >= 0) & (source < from_rows) & (target >= 0) & (target < to_rows):
        pair = tl.arange(0, HALF)
        row = from_ptr + source * (2 * HALF + HALF // 16)
        low = tl.load(row + 2 * pair).to(tl.int32)
        high = tl.load(row + 2 * pair + 1).to(tl.int32)
        code = tl.load(row + 2 * HALF + pair // 16).to(tl.int32)
        tl.store(wide_ptr + target * HALF + pair, wide_window(low, high, code))


@triton.jit(do_not_specialize=["window_rows", "tokens", "ring_rows"])
def _latents(
    x_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, query_ptr, first_ptr, first_scale_ptr,
    second_ptr, second_scale_ptr, window_ptr, wide_ptr, place_ptr, ring_ptr, source_ptr, target_ptr,
    saved_ptr, width, window_rows, tokens, ring_rows, eps,
    Q: tl.constexpr, B: tl.constexpr, HALF: tl.constexpr, HALF_ROPE: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, STAGED: tl.constexpr, WIDE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (2·tokens): a row's key, then its query; STAGED: 2·(tokens + copied rows), of those the even copy.

    FIRST, SECOND: orders of the query's quantised copies, -1: none. WIDE: what goes to the window goes to
    wide_ptr, expanded, too. OVERLAPS: with the launch before it (`launch_pdl`).
    """
    at = tl.arange(0, B)
    inside = at < Q
    pair = tl.arange(0, HALF)
    is_query = tl.program_id(0) % 2 == 1
    weight = tl.load(query_weight_ptr + at, mask=inside & is_query, other=0.0)
    even_weight = tl.load(key_weight_ptr + 2 * pair, mask=(pair >= 0) & (not is_query), other=0.0)
    odd_weight = tl.load(key_weight_ptr + 2 * pair + 1, mask=(pair >= 0) & (not is_query), other=0.0)
    if OVERLAPS:  # weights never change; all else waits for the launch before
        gdc_wait()
        gdc_launch_dependents()
    token = (tl.program_id(0) // 2).to(tl.int64)
    row = x_ptr + token * width
    if token >= tokens:
        if not is_query:
            number = token - tokens
            source = tl.load(source_ptr + number)
            copy_row(
                ring_ptr, source, ring_rows, window_ptr, number, window_rows, 2 * HALF + HALF // 16, ROW_BLOCK
            )
            if WIDE:
                _widen_row(ring_ptr, source, ring_rows, wide_ptr, number, window_rows, HALF)
    elif is_query:
        x = tl.load(row + at, mask=inside, other=0.0).to(tl.float64)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / Q + eps)
        normed = bf16_round((x * scale * weight.to(tl.float64)).to(tl.float32))
        tl.store(query_ptr + token * Q + at, to_bf16(normed), mask=inside)
        _store(first_ptr + token * Q, first_scale_ptr + token * (Q // 32), normed, at, inside, FIRST, B)
        _store(second_ptr + token * Q, second_scale_ptr + token * (Q // 32), normed, at, inside, SECOND, B)
    else:
        place = tl.load(place_ptr + token).to(tl.int64)  # on its way together with all the rest
        first = tl.load(row + Q + 2 * pair).to(tl.float64)
        second = tl.load(row + Q + 2 * pair + 1).to(tl.float64)
        turn = pair - (HALF - HALF_ROPE)
        cos = tl.load(cos_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=1.0)
        sin = tl.load(sin_ptr + token * HALF_ROPE + turn, mask=turn >= 0, other=0.0)
        target = tl.full([], -1, tl.int64)
        if STAGED:
            target = tl.load(target_ptr + token)
            saved = tl.load(saved_ptr + token)
            copy_row(
                ring_ptr, target, ring_rows, window_ptr, saved, window_rows, 2 * HALF + HALF // 16, ROW_BLOCK
            )
            if WIDE:
                _widen_row(ring_ptr, target, ring_rows, wide_ptr, saved, window_rows, HALF)
            tl.debug_barrier()
        if (place < window_rows) & (target < ring_rows) & ((place >= 0) | (target >= 0)):
            mean = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2.0 * HALF)
            scale = 1.0 / tl.sqrt(mean + eps)
            even = bf16_round((first * scale * even_weight.to(tl.float64)).to(tl.float32))
            odd = bf16_round((second * scale * odd_weight.to(tl.float64)).to(tl.float32))
            turned = bf16_round(even * cos - odd * sin)
            odd = bf16_round(even * sin + odd * cos)
            groups: tl.constexpr = HALF // 16
            size = tl.reshape(tl.maximum(tl.abs(turned), tl.abs(odd)), [groups, 16])
            code = fp8_scale(tl.max(size, axis=1))
            down = ((254 - code) << 23).to(tl.float32, bitcast=True)
            down = tl.reshape(tl.broadcast_to(down[:, None], [groups, 16]), [HALF])
            low = to_e4m3(tl.clamp(turned * down, -448.0, 448.0)).to(tl.uint8, bitcast=True)
            high = to_e4m3(tl.clamp(odd * down, -448.0, 448.0)).to(tl.uint8, bitcast=True)
            if place >= 0:
                kept = window_ptr + place * (2 * HALF + groups)
                tl.store(kept + 2 * pair, low)
                tl.store(kept + 2 * pair + 1, high)
                tl.store(kept + 2 * HALF + tl.arange(0, groups), code.to(tl.uint8))
                if WIDE:
                    each = tl.reshape(tl.broadcast_to(code[:, None], [groups, 16]), [HALF])
                    words = wide_window(low.to(tl.int32), high.to(tl.int32), each)
                    tl.store(wide_ptr + place * HALF + pair, words)
            if target >= 0:
                kept = ring_ptr + target * (2 * HALF + groups)
                tl.store(kept + 2 * pair, low)
                tl.store(kept + 2 * pair + 1, high)
                tl.store(kept + 2 * HALF + tl.arange(0, groups), code.to(tl.uint8))


def norm_latents(
    latents: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    window: torch.Tensor,
    places: torch.Tensor,
    orders: tuple[int, ...],
    staging: Staging | None = None,
    wide: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[Prepared, ...]]:
    """As the public function, for D a power of two and at most two orders."""
    tokens, width = latents.shape
    queries, keys = query_weight.shape[0], key_weight.shape[0]
    latents = latents.contiguous()
    query = latents.new_empty(tokens, queries)
    copies = tuple(
        empty_codes(query) if order == CODES else Prepared(torch.empty_like(query), order) for order in orders
    )
    first, second = (_bytes(copy) for copy in (*copies, Prepared(query, NONE), Prepared(query, NONE))[:2])
    rings, *moves = staging if staging is not None else (window, places, places, places)
    copied = moves[0].shape[0] if staging is not None else 0
    overlaps = latents.is_cuda and hopper(latents.device.index or 0)
    if tokens:
        _latents[(2 * (tokens + copied),)](  # in one: CUDA's other two end at 65,535
            latents, query_weight, key_weight, rope[0].contiguous(), rope[1].contiguous(), query,
            *first, *second, window, window if wide is None else wide.view(torch.int32), places.contiguous(),
            rings, *(index.contiguous() for index in moves),
            width, window.shape[0], tokens, rings.shape[0], eps,
            queries, triton.next_power_of_2(queries), keys // 2, rope[0].shape[1], *(*orders, NONE, NONE)[:2],
            staging is not None, wide is not None, triton.next_power_of_2(keys + keys // 32), overlaps,
            num_warps=4, enable_fp_fusion=False, **({"launch_pdl": True} if overlaps else {}),
        )  # fmt: skip
    return query, copies


def _bytes(copy: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as a kernel stores them; something of the same kind where there are no scales."""
    values = copy.values.view(torch.uint8) if copy.order == CODES else copy.values
    return values, values if copy.scale is None else copy.scale
