"""Attention of many queries on keys expanded once: awkward shapes, uneven queries, numbers out of range."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.sparse_attention_wide_hopper import attend_wide
from cedar.ops.bench.kernel_timing import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Arguments = tuple[torch.Tensor | None, ...]


def arguments(
    tokens: int,
    count: int,
    rows: int,
    half_rope: int,
    *,
    sequences: int = 3,
    index: torch.dtype = torch.int32,
) -> Arguments:
    """Of `attend_wide` but for out: uneven queries, absent keys anywhere, some queries with no entry or no
    key at all, and numbers past the end of what they index.
    """
    torch.manual_seed(tokens + count)
    held = 300
    wide = (torch.randn(sequences, held, 512, device="cuda").bfloat16() * 2.0**-7).half()
    window = (torch.randn(150, 512, device="cuda").bfloat16() * 2.0**-7).half()
    entries = torch.randint(0, held + 20, (tokens, count), device="cuda", dtype=torch.int32)
    used = torch.randint(0, count + 1, (tokens, 1), device="cuda")
    entries.masked_fill_(torch.arange(count, device="cuda") >= used, -1)
    entries.masked_fill_(torch.rand(tokens, count, device="cuda") < 0.1, -1)
    near = torch.randint(0, 170, (tokens, rows), device="cuda").to(index)
    near.masked_fill_(torch.rand(tokens, rows, device="cuda") < 0.2, -1)
    entries[::5] = -1
    near[::3] = -1
    if index == torch.int64:  # absent, too, is what would wrap to a row in 32 bits
        near.masked_fill_((near < 0) & (torch.rand(near.shape, device="cuda") < 0.5), -(1 << 40) + 5)
    seq = torch.randint(0, sequences + 1, (tokens,), device="cuda", dtype=index)
    angles = torch.rand(tokens, half_rope, device="cuda") * 6
    rope = (angles.cos(), angles.sin()) if half_rope else (None, None)
    far = (wide, seq, entries) if count else (None, None, None)
    q = torch.randn(tokens, 64, 512, device="cuda").bfloat16()
    return q, *rope, *far, window, near, torch.randn(64, device="cuda")


def _turn(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    if cos is None or sin is None:
        return x
    still = x.shape[-1] - 2 * cos.shape[1]
    left, even, odd = x[..., :still], x[..., still::2], x[..., still + 1 :: 2]
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((left, torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)), -1)


def truth(args: Arguments) -> torch.Tensor:
    """float64, on the rows as they are stored; rounded once, where the kernel rounds q."""
    q, cos, sin, wide, seq, entries, window, near, sink = args
    turned = _turn(q.double(), cos, sin).bfloat16().double()
    keys = window[near.long().clamp(0, window.shape[0] - 1)]
    present = near >= 0
    if entries is not None:
        sequence = seq.long().clamp(0, wide.shape[0] - 1)[:, None]
        keys = torch.cat((wide[sequence, entries.long().clamp(0, wide.shape[1] - 1)], keys), 1)
        present = torch.cat((entries >= 0, present), 1)
    keys = keys.double() * 128.0
    logits = (turned @ keys.transpose(1, 2) * 512**-0.5).masked_fill(~present[:, None], -torch.inf)
    logits = torch.cat((logits, sink.double()[None, :, None].expand(q.shape[0], -1, -1)), 2)
    out = torch.softmax(logits, 2)[..., :-1] @ keys
    return _turn(out, cos, None if sin is None else -sin)


def attend(args: Arguments) -> torch.Tensor:
    out = torch.full_like(args[0], torch.nan)
    return attend_wide(*args, out)


@pytest.mark.parametrize(
    ("tokens", "count", "rows", "half_rope", "index"),
    [
        (1, 512, 128, 32, torch.int32),
        (5, 37, 128, 32, torch.int64),
        (131, 512, 100, 32, torch.int32),
        (132, 200, 1, 0, torch.int64),
        (133, 0, 128, 32, torch.int32),
        (700, 512, 128, 32, torch.int64),
        (700, 130, 64, 16, torch.int32),
        (140, 700, 128, 32, torch.int64),  # more entries than the model selects
    ],
)
def test_wide_attention(tokens: int, count: int, rows: int, half_rope: int, index: torch.dtype) -> None:
    args = arguments(tokens, count, rows, half_rope, index=index)
    out = attend(args)
    none = (args[7] < 0).all(1) & ((args[5] < 0).all(1) if args[5] is not None else True)
    assert (out[none] == 0).all()
    assert relative_error(out, truth(args)) < 2e-3
    for _ in range(20):
        assert torch.equal(attend(args), out)


def test_no_keys_at_all() -> None:
    args = list(arguments(9, 0, 128, 32))
    args[7] = torch.full_like(args[7], -1)
    assert (attend(tuple(args)) == 0).all()
    args[7] = args[7][:, :0]
    assert (attend(tuple(args)) == 0).all()


def test_absent_keys_are_not_read() -> None:
    """Rows that nothing names may hold anything."""
    args = arguments(140, 512, 128, 32)
    out = attend(args)
    wide, seq, entries = args[3:6]
    used = torch.zeros(wide.shape[:2], dtype=torch.bool, device="cuda")
    there = entries >= 0
    place = seq.long().clamp_max(wide.shape[0] - 1)[:, None].expand_as(entries)
    used[place[there], entries.long().clamp_max(wide.shape[1] - 1)[there]] = True
    wide[~used] = torch.nan
    assert torch.equal(attend(args), out)
