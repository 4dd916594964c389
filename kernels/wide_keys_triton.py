# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Entries and window keys as fp16 of value·2^-7 on a GPU: eight FP4 channels a thread, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cedar.kernels.linear_triton import hopper
from cedar.kernels.packed_triton import INTERPRETED, multiply_halves
from cedar.kernels.sparse_attention_operands_hopper import FP4_WORDS
from cedar.kernels.wide_keys import rows_asked_for
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 8  # entries a program


@triton.jit
def _word(byte, scale):
    """Two fp16 of a byte's E2M1 channels (their bits: value·2^-14) times `scale`, two fp16."""
    bits = ((byte & 0x07) << 9) | ((byte & 0x08) << 12) | ((byte & 0x70) << 21) | ((byte & 0x80) << 24)
    return multiply_halves(bits, scale)


@triton.jit
def _words(payload, scale):
    """The four words of eight packed channels."""
    if INTERPRETED:
        a = _word(payload & 255, scale)
        b = _word((payload >> 8) & 255, scale)
        c = _word((payload >> 16) & 255, scale)
        d = _word((payload >> 24) & 255, scale)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            FP4_WORDS, "=r,=r,=r,=r,r,r", [payload, scale], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    return a, b, c, d


@triton.jit(do_not_specialize=["count", "page_count", "table_width"])
def expand(
    word_ptr, byte_ptr, table_ptr, out_ptr, count, page_count, table_width,
    LINES: tl.constexpr, PAGE: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    WORDS: tl.constexpr, R: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(count / R), sequences). Pages as int32 and as bytes; PAYLOAD and SCALES: the planes' first
    bytes, LINES entries each of WORDS words. OVERLAPS: with the launch before it (`launch_pdl`).
    """
    entry = tl.program_id(0) * R + tl.arange(0, R)
    sequence = tl.program_id(1).to(tl.int64)
    inside = entry < count
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    page = tl.load(table_ptr + sequence * table_width + entry // LINES, mask=inside, other=0).to(tl.int64)
    page = tl.minimum(tl.maximum(page, 0), page_count - 1) * PAGE
    line = entry % LINES
    GROUPS: tl.constexpr = WORDS // 2
    group = tl.arange(0, GROUPS)
    at = (page // 4 + PAYLOAD // 4 + line * WORDS)[:, None] + 2 * group[None, :]
    at = at[:, :, None] + tl.arange(0, 2)[None, None, :]
    payload = tl.load(word_ptr + at, mask=inside[:, None, None], other=0)
    at = (page + SCALES + line * GROUPS)[:, None] + group[None, :]
    code = tl.load(byte_ptr + at, mask=inside[:, None], other=0).to(tl.int32)
    bits = code * 0x00800080  # E4M3's bits as two fp16: value·2^-8
    scale = multiply_halves(bits, tl.full(bits.shape, 0x78007800, tl.int32))
    a, b, c, d = _words(payload, tl.broadcast_to(scale[:, :, None], payload.shape))
    four = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [R, 4 * WORDS])
    out = out_ptr + (sequence * count + entry)[:, None] * (4 * WORDS) + tl.arange(0, 4 * WORDS)[None, :]
    tl.store(out, four, mask=inside[:, None])


def fits(pages: torch.Tensor, planes: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether payloads are a power of two of words, and begin at whole ones."""
    offset, row_bytes, _ = planes[0]
    whole = all(size % 4 == 0 for size in (pages.data_ptr(), pages.stride(0), offset))
    return whole and pages.stride(1) == 1 and row_bytes >= 8 and row_bytes.bit_count() == 1


def expand_entries(
    pages: torch.Tensor, planes: tuple[tuple[int, int, int], ...], page_table: torch.Tensor, count: int
) -> torch.Tensor:
    """As the public function, where `fits`."""
    (payload, row_bytes, lines), (scales, _, _) = planes
    sequences, width = page_table.shape
    rows, channels = sequences * count, row_bytes * 2
    room = torch.empty(rows_asked_for(rows, channels), channels, dtype=torch.float16, device=pages.device)
    out = room[:rows].view(sequences, count, channels)
    if out.numel():
        overlaps = pages.is_cuda and hopper(pages.device.index or 0)
        words = pages[:, : pages.shape[1] // 4 * 4].view(torch.int32)
        expand[(triton.cdiv(count, ROWS), sequences)](
            words, pages, page_table.contiguous(), out.view(torch.int32), count, pages.shape[0], width,
            lines, pages.stride(0), payload, scales, row_bytes // 4, ROWS, overlaps,
            num_warps=4, **({"launch_pdl": True} if overlaps else {}),
        )  # fmt: skip
    return out
