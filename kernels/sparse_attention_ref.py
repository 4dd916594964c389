"""Truth for attention over packed entries and window keys with a sink: float64 softmax and p·k (spec §3)."""

from __future__ import annotations

import torch
from cedar.kernels import fp4_ref, fp8_ref, paging_ref, wide_keys_ref

BLOCK_ELEMENTS = 1 << 22  # float64 key channels [tokens, keys, D] held at a time


def attend(q: torch.Tensor, keys: torch.Tensor, absent: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """float64 [N, H, D]: q [N, H, D] over keys [N, K, D] but where absent [N, K]; all float64.

    The sink [H] is one more logit, whose probability nothing is weighted with.
    """
    logits = (
        (q @ keys.transpose(1, 2)).mul_(q.shape[-1] ** -0.5).masked_fill_(absent.unsqueeze(1), -torch.inf)
    )
    with_sink = torch.cat((logits, sink.unsqueeze(-1).expand(*q.shape[:2], 1)), -1)
    return torch.softmax(with_sink, -1)[..., :-1] @ keys


def global_keys(
    pages: torch.Tensor,
    planes: paging_ref.Planes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entries: torch.Tensor,
) -> torch.Tensor:
    """bf16 [N, K, D] of entries [N, K]; whatever some row holds at pads."""
    return fp4_ref.unpack_e4m3(*paging_ref.gather(pages, planes, page_table, seq, entries, "entries"))


def window_keys(window: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """bf16 [N, W, D] of rows [N, W] of window uint8 [R, D + D/32], R > 0; whatever some row holds at pads."""
    rows = paging_ref.bounded("window_rows", rows.clamp_min(0), window.shape[0]).to(torch.int64)
    if window.shape[0] <= rows.numel():  # many queries share few rows: unpack each once
        return fp8_ref.unpack_rows(window, width)[rows]
    return fp8_ref.unpack_rows(window[rows], width)


def wide_entries(wide: torch.Tensor, seq: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """float64 [N, K, D] of entries [N, K] of wide fp16 [S, E, D]; whatever some row holds at pads."""
    seq = paging_ref.bounded("seq", seq, wide.shape[0]).to(torch.int64)
    entries = paging_ref.bounded("entries", entries.clamp_min(0), wide.shape[1]).to(torch.int64)
    return wide_keys_ref.values(wide[seq.unsqueeze(1), entries])


def wide_window(wide: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """float64 [N, W, D] of rows [N, W] of wide fp16 [R, D], R > 0; whatever some row holds at pads."""
    rows = paging_ref.bounded("window_rows", rows.clamp_min(0), wide.shape[0]).to(torch.int64)
    return wide_keys_ref.values(wide[rows])


def sparse_attention(
    q: torch.Tensor,
    pages: torch.Tensor | None,
    planes: paging_ref.Planes,
    page_table: torch.Tensor | None,
    seq: torch.Tensor | None,
    entries: torch.Tensor | None,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    sink: torch.Tensor,
    wide: tuple[torch.Tensor | None, torch.Tensor] | None = None,
) -> torch.Tensor:
    """bf16 [N, H, D] before the inverse RoPE; entries None means no global keys. wide = (entries, window), as
    `wide_keys.WideKeys`: what is read in place of the packed keys.
    """
    if window.shape[0] == 0:
        paging_ref.check_range("window_rows", window_rows, -1, 0)
        window_rows = window_rows[:, :0]
    out = torch.empty_like(q)
    sink = sink.to(torch.float64)
    keys_each = window_rows.shape[1] + (entries.shape[1] if entries is not None else 0)
    step = max(1, BLOCK_ELEMENTS // max(1, keys_each * q.shape[2]))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        keys, indices = [], []
        if entries is not None and pages is not None and page_table is not None and seq is not None:
            if wide is not None and wide[0] is not None:
                keys.append(wide_entries(wide[0], seq[part], entries[part]))
            else:
                keys.append(global_keys(pages, planes, page_table, seq[part], entries[part]))
            indices.append(entries[part])
        if window_rows.shape[1]:
            if wide is not None:
                keys.append(wide_window(wide[1], window_rows[part]))
            else:
                keys.append(window_keys(window, window_rows[part], q.shape[2]))
            indices.append(window_rows[part])
        if not keys:
            return out.zero_()
        absent = torch.cat(indices, 1) < 0
        together = torch.cat(keys, 1).to(torch.float64).masked_fill_(absent.unsqueeze(-1), 0.0)
        out[part] = attend(q[part].to(torch.float64), together, absent, sink)
    return out
