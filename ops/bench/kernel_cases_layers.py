"""Benchmark cases: experts, linears, the packers, mHC, router and Engram gate (V4.1-Flash shapes)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cedar.kernels import (
    compress_ref,
    engram_gate_ref,
    experts_ref,
    fp4_ref,
    fp8_ref,
    linear_ref,
    mhc_ref,
    norm_ref,
    prepared_ref,
    rope_ref,
    router_ref,
    wide_keys_ref,
)
from cedar.kernels.compress_triton import pack_fp4, write_entries, write_window
from cedar.kernels.engram_gate_triton import engram_gate
from cedar.kernels.experts_triton import grouped_experts
from cedar.kernels.latents import Staging
from cedar.kernels.latents_triton import norm_latents
from cedar.kernels.linear_triton import grouped_output, linear_fp8
from cedar.kernels.mhc_triton import boundary, mix, sublayer
from cedar.kernels.paging import Plane
from cedar.kernels.prepared import CODES
from cedar.kernels.router_triton import route
from cedar.kernels.wide_keys_triton import expand_entries
from cedar.ops.bench.kernel_cases_attention import random_pages, random_table, rope_table
from cedar.ops.bench.kernel_timing import Case, relative_error

WIDTH, INNER, EXPERTS, CHOSEN, LIMIT = 5120, 2304, 384, 6, 10.0
EXPERT_BYTES = 3 * WIDTH * INNER * (0.5 + 1 / 32)


def packed_experts(count: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(payload, scale) of w1, w3, w2 with random codes."""
    out = []
    for rows, columns in ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)):
        payload = torch.empty(count, rows, columns // 2, dtype=torch.uint8, device="cuda")
        payload.view(torch.int32).random_(-(2**31), 2**31 - 1)
        scale = torch.randint(118, 122, (count, rows, columns // 32), dtype=torch.uint8, device="cuda")
        out.append((payload, scale))
    return tuple(out)


def routed(tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of one call."""
    x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    ids = (
        torch.rand(tokens, experts, device="cuda").topk(CHOSEN, dim=1).indices.sort(1).values.to(torch.int32)
    )
    return x, ids, torch.rand(tokens, CHOSEN, device="cuda")


def expert_cases() -> Iterator[Case]:
    """Decode batches and one prefill chunk over 384 experts; checked on 16."""
    few = packed_experts(16)

    def check(tokens: int) -> float:
        x, ids, weights = routed(tokens, 16)
        truth = experts_ref.grouped_experts(x, ids, weights, few, None, LIMIT)
        return relative_error(grouped_experts(x, ids, weights, few, LIMIT), truth)

    weights = packed_experts(EXPERTS)
    for tokens in (1, 4, 16, 64, 128, 4096):
        calls = [routed(tokens, EXPERTS) for _ in range(8 if tokens < 16 else 2)]
        touched = sum(int(torch.bincount(ids.flatten()).count_nonzero()) for _, ids, _ in calls) / len(calls)
        yield Case(
            operation="experts",
            shape=f"{tokens} tokens, {touched:.0f} experts",
            runs=[partial(grouped_experts, x, ids, w, weights, LIMIT) for x, ids, w in calls],
            bytes=touched * EXPERT_BYTES,
            flops=tokens * CHOSEN * 6.0 * WIDTH * INNER,
            check=partial(check, min(tokens, 133) + 3),
            tolerance=2e-3,
            target="65 % of bandwidth" if tokens < 4096 else "50 % of arithmetic",
        )


LINEARS = {  # outputs, columns
    "wq_a, wkv": (1792, WIDTH),
    "wq_b": (32768, 1280),
    "wo_b": (WIDTH, 8192),
    "shared w1, w3": (4608, WIDTH),
    "shared w2": (WIDTH, INNER),
}
Stored = tuple[
    torch.Tensor, torch.Tensor
]  # weights E4M3 [outputs, columns], scales E8M0 of blocks of 32 × 32


def stored_linears(outputs: int, columns: int) -> list[Stored]:
    """Random weights, as many as no cache holds."""
    return [
        (
            (torch.randn(outputs, columns, device="cuda") * 50).to(torch.float8_e4m3fn),
            torch.randint(110, 120, (outputs // 32, columns // 32), dtype=torch.uint8, device="cuda"),
        )
        for _ in range(min(16, math.ceil(150e6 / (outputs * columns))))
    ]


def linear_case(name: str, x: torch.Tensor, stored: list[Stored], *, codes: bool = False) -> Case:
    """Our linear of x bf16 [tokens, columns], its quantising included; `codes`: quantised by its producer."""
    (tokens, columns), outputs = x.shape, stored[0][0].shape[0]
    prepared = (prepared_ref.prepared(x, CODES),) if codes else ()

    def check() -> float:
        wide = fp8_ref.expand_blocks(*stored[0], torch.float64)
        return relative_error(linear_fp8(x, *stored[0], prepared), linear_ref.linear_fp8(x, wide))

    return Case(
        operation=f"linear fp8, {name}" + (", x as codes" if codes else ""),
        shape=f"{tokens} × {columns} → {outputs}",
        runs=[partial(linear_fp8, x, *w, prepared) for w in stored],
        bytes=outputs * columns * (1 + 1 / 1024)
        + tokens * (2 * outputs + columns * (33 / 32 if codes else 2)),
        flops=2.0 * tokens * outputs * columns,
        check=check,
        tolerance=2e-3,
        reference=partial(torch.mm, x, fp8_ref.expand_blocks(*stored[0], torch.bfloat16).T),
        reference_name="cuBLAS, bf16 weights",
        target="65 % of bandwidth",
    )


def linear_cases() -> Iterator[Case]:
    """Dense FP8 linears and the grouped output projection at decode sizes."""
    for name, (outputs, columns) in LINEARS.items():
        stored = stored_linears(outputs, columns)
        for tokens in (1, 16, 64, 128):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            yield linear_case(name, x, stored, codes=True)
            yield linear_case(name, x, stored)
        del stored
    heavy = [torch.randn(8, 1024, 4096, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(3)]
    for tokens in (1, 16, 64, 128):
        o = torch.randn(tokens, 8, 4096, device="cuda", dtype=torch.bfloat16)
        yield Case(
            operation="grouped output",
            shape=f"{tokens} × 8 × 4096 → 8 × 1024",
            runs=[partial(grouped_output, o, w) for w in heavy],
            bytes=heavy[0].numel() * 2.0 + tokens * 2 * (32768 + 8192),
            flops=2.0 * tokens * 8 * 1024 * 4096,
            check=partial(_grouped_error, o, heavy[0]),
            tolerance=2e-3,
            reference=partial(torch.bmm, o.transpose(0, 1), heavy[0].transpose(1, 2)),
            reference_name="cuBLAS bmm",
            target="65 % of bandwidth",
        )


def cache_cases() -> Iterator[Case]:
    """Entries into pages and window keys into the ring, bytes compared with the reference's."""
    rows, page = 128, 45_568
    planes = ((0, 256, rows), (32_768, 32, rows), (36_864, 64, rows), (45_056, 4, rows))
    norm, key, key_norm = (
        torch.randn(*s, device="cuda").to(torch.bfloat16) for s in ((512,), (128, 512), (128,))
    )
    for tokens in (2, 128, 8192):
        groups = tokens // 2
        kv, gate = (torch.randn(groups, 2, 512, device="cuda") for _ in range(2))
        pages = torch.zeros(groups // rows + 1, page, dtype=torch.uint8, device="cuda")
        table = torch.randperm(pages.shape[0], device="cuda").to(torch.int32)[None]
        seq = torch.zeros(groups, dtype=torch.int32, device="cuda")
        entry = torch.arange(groups, dtype=torch.int32, device="cuda")
        positions = torch.arange(groups, device="cuda") * 2
        rope = rope_table(positions)
        args = (kv, gate, norm, key, key_norm, rope, 1e-20, pages, planes, table, seq, entry)

        def check(args: tuple[Any, ...] = args, positions: torch.Tensor = positions) -> float:
            kv, gate, norm, key, key_norm, _, eps, pages, planes, table, _, entry = args
            write_entries(*args)
            frequencies = 1.0 / 160000.0 ** (torch.arange(0, 64, 2, device="cuda", dtype=torch.float32) / 64)
            pooled = compress_ref.pool_groups(kv, gate)
            truth = compress_ref.entries(pooled, norm, key, key_norm, positions, frequencies, eps)
            wrong = 0.0
            for (offset, size, lines), rows_ in zip(planes, truth, strict=True):
                stored = pages[:, offset : offset + size * lines].view(-1, lines, size)
                here = stored[table[0][(entry // lines).long()].long(), (entry % lines).long()]
                wrong += float((here != rows_).any(1).float().mean())
            return wrong

        yield Case(
            operation="compress into pages",
            shape=f"{tokens} tokens, m=2",
            runs=[partial(write_entries, *args)],
            bytes=groups * (8192 + 356.0),
            flops=groups * 2 * 512 * 128.0,
            check=check,
            tolerance=0.02,  # rows in which the index key's product, summed in fp32, rounds otherwise
            target="60 % of bandwidth" if tokens == 8192 else "",
        )
        if tokens == 8192:  # one set lies in the cache, as rows do that were just projected; four do not
            sets = [torch.randn(2, groups, 2, 512, device="cuda") for _ in range(4)]
            yield Case(
                operation="compress into pages",
                shape=f"{tokens} tokens, m=2, from memory",
                runs=[partial(write_entries, pair[0], pair[1], *args[2:]) for pair in sets],
                bytes=groups * (8192 + 356.0),
                flops=groups * 2 * 512 * 128.0,
                check=check,
                tolerance=0.02,
                target="60 % of bandwidth",
            )
    for tokens in (1, 128, 8192):
        k = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(tokens, device="cuda") + 7
        ring = torch.zeros(tokens, 528, dtype=torch.uint8, device="cuda")
        places = torch.randperm(tokens, device="cuda").to(torch.int32)
        call = (k, norm, rope_table(positions), 1e-20, ring, places)

        def check_window(call: tuple[Any, ...] = call, positions: torch.Tensor = positions) -> float:
            write_window(*call)
            k, norm, _, eps, ring, places = call
            frequencies = 1.0 / 160000.0 ** (torch.arange(0, 64, 2, device="cuda", dtype=torch.float32) / 64)
            truth = rope_ref.rotate(norm_ref.rms_norm(k, norm, eps), positions, frequencies, False)
            return float((ring[places.long()] != fp8_ref.pack_rows(truth)).any(1).sum())

        yield Case(
            operation="window keys",
            shape=f"{tokens} tokens",
            runs=[partial(write_window, *call)],
            bytes=tokens * (1024 + 528 + 256.0),
            check=check_window,
            target="one launch",
        )
    yield from chunk_cases()
    for tokens in (64, 8192):
        x = torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        yield Case(
            operation="pack index queries",
            shape=f"{tokens} × 32 × 128",
            runs=[partial(pack_fp4, x, False)],
            bytes=tokens * 32 * (256 + 68.0),
            check=partial(_pack_error, x),
        )


def chunk_cases() -> Iterator[Case]:
    """Keys expanded once for a chunk, of layer 2's planes in Flash's pages: entries, and window keys beside
    norms and rows.
    """
    count, lines = 65_536, 128
    planes = Plane(0, 256, lines), Plane(32_768, 32, lines)
    pages = random_pages(1024)
    pages[:, 32_768:36_864] = torch.randint(0x28, 0x40, (1024, 4096), dtype=torch.uint8, device="cuda")
    tables = [random_table(1, count // lines, 1024) for _ in range(2)]

    def check_entries() -> float:
        call = (pages, planes, tables[0], count - 77)
        return float((expand_entries(*call) != wide_keys_ref.expand_entries(*call)).any(2).sum())

    yield Case(
        operation="expand entries",
        shape=f"{count} entries",
        runs=[partial(expand_entries, pages, planes, table, count) for table in tables],
        bytes=count * (288 + 1024.0),
        check=check_entries,
    )
    tokens, window = 4096, 128
    latents = torch.randn(tokens, 1792, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(width, device="cuda").to(torch.bfloat16) for width in (1280, 512)]
    rope = rope_table(torch.arange(tokens, device="cuda"))
    rings = fp8_ref.pack_rows(torch.randn(window, 512, device="cuda", dtype=torch.bfloat16))
    buffer = torch.empty(window + tokens, 528, dtype=torch.uint8, device="cuda")
    numbers = torch.arange(window + tokens, device="cuda")
    targets = torch.where(numbers[:tokens] < tokens - window, -1, numbers[:tokens] % window)
    staging = Staging(rings, numbers[:window] * 0 - 1, targets, numbers[:tokens] % window)
    given: tuple[Any, ...] = (latents, *weights, rope, 1e-20, buffer, numbers[window:], (CODES,), staging)
    for wide in (None, torch.empty(window + tokens, 512, dtype=torch.float16, device="cuda")):
        call = (*given, wide)

        def check_latents(wide: torch.Tensor | None = wide, call: tuple[Any, ...] = call) -> float:
            query, _ = norm_latents(*call)
            truth = norm_ref.rms_norm(latents[:, :1280], weights[0], 1e-20)
            wrong = float((query != truth).any(1).sum())
            if wide is not None:
                wrong += float((wide != wide_keys_ref.expand_window(buffer, 512)).any(1).sum())
            return wrong

        yield Case(
            operation="latents of a chunk" + ("" if wide is None else ", window keys expanded too"),
            shape=f"{tokens} tokens",
            runs=[partial(norm_latents, *call)],
            bytes=tokens * (3584 + 2560 + 1320 + 256 + 528 + (0 if wide is None else 1024.0)),
            check=check_latents,
            target="one launch",
        )


def _gate_error(call: tuple[Any, ...]) -> float:
    return relative_error(engram_gate(*call), engram_gate_ref.engram_gate(*call))


def _grouped_error(o: torch.Tensor, weight: torch.Tensor) -> float:
    truth = torch.einsum("ngc,grc->ngr", o.double(), weight.double()).flatten(1)
    return relative_error(grouped_output(o, weight), truth)


def _pack_error(x: torch.Tensor) -> float:
    pairs = zip(pack_fp4(x, False), fp4_ref.pack_e8m0(x), strict=True)
    return float(sum(int((a != b).sum()) for a, b in pairs))


def small_cases() -> Iterator[Case]:
    """mHC, router, Engram gate."""
    fn = torch.randn(24, 4 * WIDTH, device="cuda") * 0.01
    scale, base = torch.rand(3, device="cuda"), torch.randn(24, device="cuda")
    norm = (torch.rand(WIDTH, device="cuda").to(torch.bfloat16), 1e-20)
    mixer = (fn, scale, base, 1e-20, 1e-6, 20)
    for tokens in (1, 64, 4096):
        x = torch.randn(tokens, 4, WIDTH, device="cuda", dtype=torch.bfloat16)
        y = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
        pre, post, comb = mix(x, fn, scale, base, 1e-20, 1e-6, 20)

        def check_mix(x: torch.Tensor = x) -> float:
            out = mix(x, fn, scale, base, 1e-20, 1e-6, 20)
            truth = mhc_ref.mix(x, fn, scale, base, 1e-20, 1e-6, 20)
            return max(relative_error(a, b) for a, b in zip(out, truth, strict=True))

        def check_boundary(
            x: torch.Tensor = x, y: torch.Tensor = y, mixes: tuple[Any, ...] = (pre, post, comb)
        ) -> float:
            pre, post, comb = mixes
            new, row = boundary(x, (y, post, comb), pre, norm)
            truth = mhc_ref.expand(x, y, post, comb)
            rows = norm_ref.rms_norm(mhc_ref.collapse(truth, pre), *norm)
            assert row is not None
            return float((new != truth).sum() + (row != rows).sum()) / new.numel()

        def check_sublayer(
            x: torch.Tensor = x, y: torch.Tensor = y, mixes: tuple[Any, ...] = (pre, post, comb)
        ) -> float:
            pre, post, comb = mixes
            new, row, mixed, _ = sublayer(x, (y, post, comb), pre, norm, mixer)
            truth = mhc_ref.expand(x, y, post, comb)
            rows = norm_ref.rms_norm(mhc_ref.collapse(truth, pre), *norm)
            wrong = float((new != truth).sum() + (row != rows).sum())
            wanted = mhc_ref.mix(truth, *mixer)
            return wrong + max(relative_error(a, b) for a, b in zip(mixed, wanted, strict=True))

        yield Case(
            operation="mHC boundary with mix",
            shape=f"{tokens} tokens",
            runs=[partial(sublayer, x, (y, post, comb), pre, norm, mixer)],
            bytes=tokens * (8 * WIDTH + 2 * WIDTH) * 2.0 + fn.numel() * 4,
            flops=tokens * 48.0 * 4 * WIDTH,
            check=check_sublayer,
            tolerance=1e-5,
            target="one launch" if tokens < 4096 else "60 % of bandwidth",
        )
        yield Case(
            operation="mHC mix",
            shape=f"{tokens} tokens",
            runs=[partial(mix, x, fn, scale, base, 1e-20, 1e-6, 20)],
            bytes=tokens * 4 * WIDTH * 2.0 + fn.numel() * 4,
            flops=tokens * 48.0 * 4 * WIDTH,
            check=check_mix,
            tolerance=1e-5,
        )
        yield Case(
            operation="mHC expand, collapse, norm",
            shape=f"{tokens} tokens",
            runs=[partial(boundary, x, (y, post, comb), pre, norm)],
            bytes=tokens * (8 * WIDTH + 2 * WIDTH) * 2.0,
            check=check_boundary,
            target="60 % of bandwidth" if tokens == 4096 else "",
        )
        gate = torch.randn(EXPERTS, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
        bias = torch.randn(EXPERTS, device="cuda") * 0.05

        def check_route(y: torch.Tensor = y, gate: torch.Tensor = gate, bias: torch.Tensor = bias) -> float:
            ids, weights = route(y, gate, bias, CHOSEN, 1.5)
            truth_ids, truth = router_ref.route(y, gate, bias, CHOSEN, 1.5)
            same = (ids == truth_ids).all(1)
            return float(1 - same.float().mean()) + float((weights - truth)[same].abs().max())

        yield Case(
            operation="router",
            shape=f"{tokens} tokens",
            runs=[partial(route, y, gate, bias, CHOSEN, 1.5)],
            bytes=tokens * WIDTH * 2.0 + gate.numel() * 2,
            flops=tokens * 2.0 * EXPERTS * WIDTH,
            check=check_route,
            tolerance=2e-3,
        )
        key = torch.randn_like(x)
        q, k = (torch.randn(4, WIDTH, device="cuda").to(torch.bfloat16) for _ in range(2))
        image = torch.rand(tokens, device="cuda") < 0.2
        gated = (x, key, y, q, k, image, 1e-20)
        yield Case(
            operation="Engram gate",
            shape=f"{tokens} tokens",
            runs=[partial(engram_gate, *gated)],
            bytes=tokens * (12 * WIDTH + WIDTH) * 2.0,
            check=partial(_gate_error, gated),
            tolerance=1e-3,
        )
