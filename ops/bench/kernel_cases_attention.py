"""Benchmark cases: sparse attention, index scores, selection (V4.1-Flash shapes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cedar.kernels import fp4_ref, fp8_ref, index_scores_ref, paging_ref, select_ref, wide_keys_ref
from cedar.kernels.index_scores_triton import scores as score_kernel
from cedar.kernels.paging import Plane
from cedar.kernels.select_triton import candidate_blocks, keep_blocks, top_k
from cedar.kernels.sparse_attention_triton import sparse_attention
from cedar.kernels.sparse_attention_wide_hopper import attend_wide
from cedar.ops.bench.kernel_timing import Case, relative_error

PAGE_BYTES, ROWS = 227_840, 256  # the flash page; layer 20's planes (ratio 1)
MAIN = (Plane(136_704, 256, ROWS), Plane(202_240, 32, ROWS))
ATTENTION_SHAPES = (
    (1, 1),
    (16, 1),
    (64, 1),
    (128, 1),
    (6, 6),
    (96, 6),
    (384, 6),
    (768, 6),
    (4096, 4096),
)  # queries, a sequence
ATTENTION_FLOPS = 83.9e6  # of one query: 64 heads, 640 keys, 512 channels, twice
INDEX = (Plane(210_432, 64, ROWS), Plane(226_816, 4, ROWS))


def random_pages(count: int) -> torch.Tensor:
    """Pages of random payload with finite scales, uint8 [count, PAGE_BYTES] on the GPU."""
    pages = torch.empty(count, PAGE_BYTES, dtype=torch.uint8, device="cuda")
    pages.view(torch.int64).random_()
    pages.view(torch.int64).bitwise_xor_(torch.randint(-(2**62), 2**62, (PAGE_BYTES // 8,), device="cuda"))
    pages[:, 202_240:210_432] = torch.randint(0x28, 0x40, (count, 8192), dtype=torch.uint8, device="cuda")
    pages[:, 226_816:] = torch.randint(124, 130, (count, 1024), dtype=torch.uint8, device="cuda")
    return pages


def random_table(sequences: int, width: int, pages: int) -> torch.Tensor:
    """A page table int32 [sequences, width] of distinct pages while they last."""
    need = sequences * width
    ids = torch.cat([torch.randperm(pages, device="cuda") for _ in range(-(-need // pages))])[:need]
    return ids.view(sequences, width).to(torch.int32)


def rope_table(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) fp32 [N, 32]."""
    frequencies = 1.0 / 160000.0 ** (torch.arange(0, 64, 2, device="cuda", dtype=torch.float32) / 64)
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float64)
    even, odd = wide[..., -64::2], wide[..., -63::2]
    c, s = cos.to(torch.float64)[:, None], sin.to(torch.float64)[:, None]
    turned = torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)
    return torch.cat((wide[..., :-64], turned), -1)


def attention_truth(args: tuple[Any, ...], picks: torch.Tensor) -> torch.Tensor:
    """float64 [len(picks), H, D] of some tokens of `sparse_attention`'s arguments, not rounded after p·k."""
    q, pages, planes, table, seq, entries, window, rows, sink, (cos, sin) = args
    turned = _turn(q[picks], cos[picks], sin[picks]).to(torch.bfloat16).to(torch.float64)
    packed = paging_ref.gather(pages, planes, table, seq[picks], entries[picks])
    near = fp8_ref.unpack_rows(window[rows[picks].clamp_min(0).long()], 512)
    keys = torch.cat((fp4_ref.unpack_e4m3(*packed), near), 1).to(torch.float64)
    present = torch.cat((entries[picks] >= 0, rows[picks] >= 0), 1)
    logits = (turned @ keys.transpose(1, 2) * 512**-0.5).masked_fill(~present[:, None], -torch.inf)
    logits = torch.cat((logits, sink.to(torch.float64)[None, :, None].expand(len(picks), -1, -1)), 2)
    o = torch.softmax(logits, 2)[..., :-1] @ keys
    return _turn(o, cos[picks], -sin[picks])


def attention_args(
    tokens: int, pages: torch.Tensor, queries: int = 1, context: int = 65_536
) -> tuple[Any, ...]:
    """Arguments of one call: `tokens` queries, `queries` of a sequence, 512 entries and 128 window rows
    each.
    """
    sequences = max(1, tokens // queries)
    table = random_table(sequences, context // ROWS, pages.shape[0])
    seq = torch.arange(tokens, device="cuda", dtype=torch.int32) // queries
    entries = (
        torch.rand(tokens, context, device="cuda").topk(512, dim=1).indices.sort(1).values.to(torch.int32)
    )
    window = fp8_ref.pack_rows(torch.randn(sequences * 128, 512, device="cuda", dtype=torch.bfloat16))
    rows = (seq[:, None] * 128 + torch.arange(128, device="cuda", dtype=torch.int32)).contiguous()
    q = torch.randn(tokens, 64, 512, device="cuda", dtype=torch.bfloat16) * 0.7
    rope = rope_table(torch.randint(0, context, (tokens,), device="cuda"))
    return q, pages, MAIN, table, seq, entries, window, rows, torch.randn(64, device="cuda"), rope


def _baseline(args: tuple[Any, ...]) -> Callable[[], object]:
    """torch's own operations on keys already gathered and in bf16."""
    q, sink = args[0], args[8]
    keys = torch.randn(q.shape[0], 640, 512, device="cuda", dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        logits = torch.bmm(q, keys.transpose(1, 2)).float() * 512**-0.5
        logits = torch.cat((logits, sink[None, :, None].expand(q.shape[0], -1, -1)), 2)
        return torch.bmm(torch.softmax(logits, 2)[..., :-1].to(q.dtype), keys)

    return run


def attention_case(
    tokens: int, queries: int, pages: torch.Tensor
) -> tuple[list[tuple[Any, ...]], torch.Tensor, Case]:
    """Arguments (the first with pads, for the check), the queries checked, and the case of our kernel."""
    copies = [attention_args(tokens, pages, queries) for _ in range(6 if tokens < 200 else 2)]
    copies[0][5][:, 400:].masked_fill_(torch.rand(tokens, 1, device="cuda") < 0.3, -1)
    picks = torch.randperm(tokens, device="cuda")[:64]

    def check() -> float:
        out = sparse_attention(*copies[0], settled=True)
        return relative_error(out[picks], attention_truth(copies[0], picks))

    case = Case(
        operation="sparse attention",
        shape=f"{tokens} queries" + (f", {queries} a sequence" if queries > 1 else ""),
        runs=[partial(sparse_attention, *a, settled=True) for a in copies[1:]],  # older than any launch
        bytes=attention_bytes(tokens, queries, 288, 528),
        flops=tokens * ATTENTION_FLOPS,
        check=check,
        tolerance=2e-3,
        reference=_baseline(copies[0]) if tokens <= 128 else None,
        reference_name="torch, keys gathered in bf16",
        target=_target(tokens // queries, tokens),
    )
    return copies, picks, case


def _target(batch: int, tokens: int) -> str:
    """Of decode by sequences, of prefill by the chunk; a batch of one within 2.5 times of a bare launch."""
    if batch >= 64 or tokens >= 4096:
        return "60 % of floor"
    return "7.5 us" if batch == 1 else ""


def wide_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`attend_wide`'s arguments of `attention_args`': every key as fp16 times 2^-7."""
    q, pages, planes, table, seq, entries, window, rows, sink, (cos, sin) = args
    far = wide_keys_ref.expand_entries(pages, planes, table, table.shape[1] * ROWS)
    near = wide_keys_ref.expand_window(window, 512)
    return q, cos, sin, far, seq, entries, near, rows, sink, torch.empty_like(q)


def wide_case(tokens: int, pages: torch.Tensor) -> Case:
    """A chunk's queries of one sequence on keys that were expanded before; bytes and operations are those of
    the same work on packed keys.
    """
    packed, case = attention_case(tokens, tokens, pages)[::2]
    copies = [wide_args(args) for args in packed]
    picks = torch.randperm(tokens, device="cuda")[:64]

    def check() -> float:
        copies[0][-1].fill_(torch.nan)
        return relative_error(attend_wide(*copies[0])[picks], attention_truth(packed[0], picks))

    return replace(
        case,
        operation="sparse attention, keys expanded once",
        runs=[partial(attend_wide, *args) for args in copies[1:]],
        check=check,
    )


def attention_bytes(tokens: int, queries: int, entry: int, near: int) -> float:
    """Bytes moved: 512 entries a query, 128 window rows a sequence, q and o, indices."""
    return tokens * (512 * entry + 131_072 + 2_560) + max(1, tokens // queries) * 128 * near


def attention_cases() -> Iterator[Case]:
    """Decode at several batches and one prefill chunk; the last few entries of each query are pads."""
    pages = random_pages(2048)
    for tokens, queries in ATTENTION_SHAPES:
        yield attention_case(tokens, queries, pages)[2]
    yield wide_case(4096, pages)


def score_args(
    tokens: int, queries: int, context: int, pages: torch.Tensor, visible: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Arguments of `index_scores_triton.scores`: `queries` neighbouring tokens a sequence."""
    sequences = max(1, tokens // queries)
    table = random_table(sequences, -(-context // ROWS), pages.shape[0])
    seq = torch.arange(tokens, device="cuda", dtype=torch.int32) // queries
    payload, scales = fp4_ref.pack_e8m0(torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16))
    weights = torch.randn(tokens, 32, device="cuda") * 0.02
    if visible is None:
        visible = context - queries + torch.arange(tokens, device="cuda", dtype=torch.int32) % queries + 1
    return payload, scales, weights, pages, INDEX, table, seq, visible, context


def score_error(args: tuple[Any, ...], picks: torch.Tensor) -> float:
    """Greatest difference from float64 over picked tokens, relative to the scores' spread; wrong -inf
    count as 1.
    """
    payload, scales, weights, pages, planes, table, seq, visible, width = args
    out, best = score_kernel(*args, blocks=True)
    assert best is not None
    padded = torch.nn.functional.pad(out[picks], (0, -width % 8), value=-torch.inf)
    if not torch.equal(padded.view(len(picks), -1, 8).amax(2), best[picks]):
        return 2.0
    q = fp4_ref.unpack_e8m0(payload[picks], scales[picks], torch.float64)
    truth = index_scores_ref.scores(
        q, weights[picks].double(), pages, planes, table, seq[picks], visible[picks], width
    )
    return score_difference(out[picks], truth)


def score_difference(out: torch.Tensor, truth: torch.Tensor) -> float:
    """As `score_error`, of scores already computed."""
    if not torch.equal(torch.isinf(out), torch.isinf(truth)):
        return 1.0
    finite = ~torch.isinf(truth)
    return float((out.double() - truth)[finite].abs().max() / truth[finite].std())


def index_cases() -> Iterator[Case]:
    """Decode over long contexts, gathered pools, prefill chunks."""
    pages = random_pages(4096 + 8)
    for tokens, queries, context in (
        (1, 1, 8_192), (1, 1, 65_536), (1, 1, 262_144), (1, 1, 1_048_576), (16, 1, 131_072), (6, 6,
        1_048_576),
        (96, 6, 131_072),
    ):  # fmt: skip
        copies = [score_args(tokens, queries, context, pages) for _ in range(4)]
        odd = score_args(tokens, queries, context - 3, pages)
        picks = torch.arange(min(tokens, 3), device="cuda")
        yield Case(
            operation="index scores, decode",
            shape=f"{tokens} queries, {queries} a sequence, N={context}",
            runs=[partial(score_kernel, *a) for a in copies],
            bytes=tokens // queries * context * 68 + tokens * context * 4,
            flops=tokens * context * 8192.0,
            check=partial(score_error, odd, picks),
            tolerance=1e-5,
            target="70 % of floor" if context >= 262_144 and queries == 1 else "",
        )
    for context in (65_536, 262_144, 1_048_576):
        sets = []
        for _ in range(4):
            args = score_args(1, 1, context, pages)
            blocks = torch.randperm(context // 8, device="cuda")[:2048].sort().values.to(torch.int32)[None]
            sets.append(((*args[:8], 16_384), select_ref.block_positions(blocks, 8, args[7])))

        def check_pool(item: tuple[Any, ...] = sets[0]) -> float:
            args, pool = item
            pool = pool.clone()
            pool[:, -700:] = -1
            out, _ = score_kernel(*args, entries=pool)
            q = fp4_ref.unpack_e8m0(args[0], args[1], torch.float64)
            truth = index_scores_ref.scores_gathered(
                q, args[2].double(), args[3], args[4], args[5], args[6], pool
            )
            return score_difference(out, truth)

        yield Case(
            operation="index scores, gathered pool",
            shape=f"16384 of N={context}",
            runs=[partial(score_kernel, *args, entries=pool) for args, pool in sets],
            bytes=16_384 * (68 + 4 + 4),
            flops=134e6,
            check=check_pool,
            tolerance=1e-5,
            target="independent of N",
        )
    for context, tokens in ((16_384, 4096), (131_072, 4096), (131_072, 1000)):
        visible = context - tokens + torch.arange(tokens, device="cuda", dtype=torch.int32) + 1
        args = score_args(tokens, tokens, context, pages, visible)
        half = score_args(tokens, tokens // 2, context - 3, pages, visible - 3)
        picks = torch.tensor([0, 1, tokens // 2, tokens - 1], device="cuda")
        yield Case(
            operation="index scores, prefill",
            shape=f"{tokens} queries, N={context}",
            runs=[partial(score_kernel, *args)],
            bytes=context * 68 + tokens * context * 4.0,
            flops=8192.0 * float(visible.double().sum()),
            check=partial(score_error, half, picks),
            tolerance=1e-5,
            target="55 % of arithmetic" if tokens == 4096 else "",
        )


def select_cases() -> Iterator[Case]:
    """Top 512 of rows of several lengths; the candidate pool of 2048 blocks."""
    for count, rows in (
        (16_384, 1),
        (16_384, 64),
        (131_072, 1),
        (131_072, 64),
        (1_048_576, 1),
        (1_048_576, 64),
    ):
        copies = [torch.randn(rows, count, device="cuda") for _ in range(1 if rows * count > 2**24 else 8)]

        def check(x: torch.Tensor = copies[0]) -> float:
            wrong = 0
            for scores in (
                x[:4],
                (x[:4] * 4).round(),
                x[:3, :-77],
                x[:4].masked_fill(x[:4] < 3.2, -torch.inf),
                x[:2] * 0,
            ):
                wrong += int((top_k(scores, 512) != select_ref.top_k(scores, 512)).sum())
            return float(wrong)

        yield Case(
            operation="top 512",
            shape=f"{rows} × {count}",
            runs=[partial(top_k, x, 512) for x in copies],
            bytes=rows * count * 4.0 + rows * 2048,
            check=check,
            reference=partial(torch.topk, copies[0], 512, 1),
            reference_name="torch.topk",
            target={16_384: "15 us", 1_048_576: "6x torch.topk" if rows == 1 else "5x torch.topk"}.get(
                count, ""
            ),
        )
    for count in (16_384, 131_072):
        best = [torch.randn(16, count, device="cuda") for _ in range(8)]
        visible = torch.randint(count * 4, count * 8, (16,), device="cuda", dtype=torch.int32)

        def check_blocks(count: int = count) -> float:
            scores = torch.randn(3, count * 8 - 5, device="cuda")
            seen = torch.tensor([count * 8 - 5, count * 4 + 3, 17], device="cuda", dtype=torch.int32)
            return float(
                (
                    candidate_blocks(scores, seen, 8, 2048)
                    != select_ref.candidate_blocks(scores, seen, 8, 2048)
                ).sum()
            )

        yield Case(
            operation="candidate blocks",
            shape=f"16 × 2048 of {count}",
            runs=[partial(keep_blocks, b, visible, 8, 2048) for b in best],
            bytes=16 * count * 4.0,
            check=check_blocks,
            reference=partial(torch.topk, best[0], 2048, 1),
            reference_name="torch.topk",
        )
