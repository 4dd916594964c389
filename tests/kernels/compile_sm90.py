"""Compiles the kernels for sm_90 without running them: ``python -m tests.kernels.compile_sm90``; a line of
JSON each.

In a process of its own, because the interpreter, once chosen, stays.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from cedar.kernels import (
    compress_hopper,
    compress_triton,
    decode_tables_triton,
    experts_fp8_hopper,
    experts_hopper,
    experts_one_hopper,
    experts_token_hopper,
    experts_trades_hopper,
    grouped_bulk_hopper,
    grouped_output_hopper,
    index_score_one_hopper,
    index_scores_fp8_triton,
    index_scores_hopper,
    latents_triton,
    linear_bulk_hopper,
    linear_few_hopper,
    linear_many_hopper,
    linear_trades_hopper,
    linear_wide_hopper,
    mhc_few_hopper,
    mhc_hopper,
    mhc_many_hopper,
    mhc_triton,
    router_one_hopper,
    router_rows_hopper,
    router_tiles_hopper,
    router_triton,
    sampling_triton,
    select_many_triton,
    select_slices_triton,
    sparse_attention_few_hopper,
    sparse_attention_hopper,
    sparse_attention_teams_hopper,
    sparse_attention_trades_hopper,
    sparse_attention_wide_hopper,
    weights_hopper,
    wide_keys_triton,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

PAGE = {"ROWS": 256, "PAGE": 227_840}
WIDE = {"M": 128, "R": 128, "STAGES": 4, "WARPS": 8, "P": 32}
BULK = {"N": 256, "TOGETHER": 8, "CONSUMERS": 232, "LOADER": 40}
OUT = dict.fromkeys(("seen_ptr", "out_ptr"), "*bf16")
INDEX = {**PAGE, "PAYLOAD": 210_432, "SCALES": 226_816}
BYTES = ("pages", "window", "q", "q_scale", "weight", "scale", "w1", "s1", "w3", "s3", "w2", "s2", "ring",
         "word", "out_scale")  # fmt: skip
FLOATS = ("cos", "sin", "sink", "lse", "out32", "part", "guess", "scores", "kv",
          "gate", "post", "comb", "pre", "fn", "base")  # fmt: skip
HALVES = ("x", "norm", "key", "key_norm", "y", "row")
ROUTED = {"gate_ptr": "*bf16", "bands_ptr": "*u8"}
MIXED = dict.fromkeys(
    ("scale_ptr", "old_scale_ptr", "old_base_ptr", "sums_ptr", "new_pre_ptr", "new_post_ptr", "new_comb_ptr"),
    "*fp32",
)
SCALARS = {"scale": "fp32", "eps": "fp32", "mix_eps": "fp32", "hc_eps": "fp32", "limit": "fp32"}


def block(kind: str, *shape: int, swizzle: int = 128) -> str:
    """The type of a descriptor of blocks of that shape."""
    layout = NVMMASharedLayout(swizzle, {"i32": 32, "fp8e4nv": 8, "u8": 8}.get(kind, 16), len(shape))
    return f"tensordesc<{kind}{list(shape)},{layout!r}>"


CASES: tuple[tuple[Any, dict[str, Any], dict[str, str], int], ...] = (
    (
        sparse_attention_hopper.attend_hopper,
        {
            **PAGE,
            "PAYLOAD": 136_704,
            "SCALES": 202_240,
            "TILES": 8,
            "NAMES": 512,
            "HALF_ROPE": 32,
            "SPLITS": 2,
            "FOLLOW_REGISTERS": sparse_attention_hopper.FOLLOW_REGISTERS,
            "PRODUCE_REGISTERS": sparse_attention_hopper.PRODUCE_REGISTERS,
        },
        {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*fp16"},
        4,
    ),
    *(
        (
            sparse_attention_trades_hopper.attend_trades,
            {
                **PAGE,
                "PAYLOAD": 136_704,
                "SCALES": 202_240,
                "TILES": 8,
                "NAMES": 512,
                "HALF_ROPE": 32,
                "SPLITS": splits,
                "SETTLED": splits == 1,
                "WEIGH_REGISTERS": sparse_attention_trades_hopper.WEIGH_REGISTERS,
                "PRODUCE_REGISTERS": sparse_attention_trades_hopper.PRODUCE_REGISTERS,
            },
            {"q_ptr": "*bf16", "out_ptr": "*bf16"},
            4,
        )
        for splits in (1, 2)
    ),
    (
        sparse_attention_wide_hopper.attend_expanded,
        {
            "TILES": 8,
            "NAMES": 512,
            "NEAR": 2,
            "HALF_ROPE": 32,
            "WEIGH_REGISTERS": sparse_attention_wide_hopper.WEIGH_REGISTERS,
            "FETCH_REGISTERS": sparse_attention_wide_hopper.FETCH_REGISTERS,
        },
        {"q_ptr": "*bf16", "out_ptr": "*bf16", "wide_ptr": "*fp16", "window_ptr": "*fp16"},
        4,
    ),
    (
        sparse_attention_few_hopper.attend_few,
        {
            **PAGE,
            "PAYLOAD": 210_432,
            "SCALES": 226_816,
            "NEAR": 4,
            "SPLITS": 20,
            "heads": 8,
            "HALF_ROPE": 8,
            "ALONE": False,
        },
        {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*fp16"},
        4,
    ),
    *(
        (
            sparse_attention_teams_hopper.attend_teams,
            {
                **PAGE,
                "PAYLOAD": 136_704,
                "SCALES": 202_240,
                "NEAR": 16 // warps,
                "SPLITS": 80 // warps,
                "heads": 64,
                "HALF_ROPE": 32,
                "ALONE": False,
                "SETTLED": settled,
            },
            {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*i32"},
            warps,
        )
        for warps, settled in ((4, True), (8, True), (16, False))
    ),
    (
        index_scores_hopper.decode_scores,
        {**INDEX, "KEYS": 64, "TOKENS": 1, "GATHER": False, "BLOCKS": True},
        {"weight_ptr": "*fp32", "out_ptr": "*fp32", "best_ptr": "*fp32"},
        4,
    ),
    (
        index_score_one_hopper.score_one,
        {**INDEX, "BLOCKS": True, "STAGES": index_score_one_hopper.STAGES},
        {"weight_ptr": "*fp32", "out_ptr": "*fp32", "best_ptr": "*fp32"},
        4,
    ),
    (
        index_scores_fp8_triton.score_many,
        {**INDEX, "CHUNK": 256, "BLOCKS": False},
        {"q_ptr": "*fp8e5", "weight_ptr": "*fp32", "out_ptr": "*fp32", "best_ptr": "*fp32"},
        8,
    ),
    (
        experts_token_hopper.one_token,
        {"COLUMNS": 2304, "XS": 128, "STAGES": 4, "GATED": False, "K": 6},
        {
            **dict.fromkeys(("first_desc", "second_desc", "shared_desc"), block("u8", 32, 128)),
            "x_desc": block("u8", 16, 128),
            "x8_desc": block("u8", 8, 128),
            **dict.fromkeys(("first_scale_ptr", "second_scale_ptr", "shared_scale_ptr"), "*u8"),
            **dict.fromkeys(("weight_ptr", "xs_ptr", "out_scale_ptr"), "*fp32"),
            "out_ptr": "*bf16",
            "total_ptr": "*bf16",
        },
        4,
    ),
    (
        grouped_output_hopper.grouped_few,
        {"COLUMNS": 4096, "N": 8, "SPLITS": 8, "STAGES": 4, "UNIT": 2},
        {
            "o_desc": block("bf16", 8, 64),
            "w_desc": block("bf16", 64, 64),
            "out_ptr": "*fp8e4nv",
            "code_ptr": "*u8",
        },
        4,
    ),
    (
        grouped_output_hopper.grouped_codes,
        {"COLUMNS": 4096, "M": 128, "R": 64, "STAGES": 8, "WARPS": 8},
        {
            "o_desc": block("bf16", 128, 64),
            "w_desc": block("bf16", 64, 64),
            "out_ptr": "*fp8e4nv",
            "code_ptr": "*u8",
        },
        8,
    ),
    (
        weights_hopper.linear_rows,
        {"columns": 4096, "T": 8, "SPLITS": 4},
        {"weight_ptr": "*bf16", "out_ptr": "*bf16"},
        4,
    ),
    (
        linear_few_hopper.few,
        {
            "COLUMNS": 5120,
            "NB": 10,
            "SPLITS": 4,
            "N": 16,
            "STAGES": 5,
            "ASKED": 3,
            "WARPS": 4,
            "KQ": 1,
            "AHEAD": 1,
            "EARLY": False,
            "CODES": True,
        },
        {
            "w_desc": block("fp8e4nv", 1, 1, 64, 128),
            "x_desc": block("fp8e4nv", 2, 16, 128),
            "out_ptr": "*bf16",
        },
        4,
    ),
    (
        linear_many_hopper.many,
        {
            "COLUMNS": 5120,
            "NB": 10,
            "SPLITS": 4,
            "M": 64,
            "R": 64,
            "STAGES": 3,
            "WARPS": 4,
            "EARLY": True,
        },
        {
            "w_desc": block("fp8e4nv", 64, 128),
            "x_desc": block("fp8e4nv", 64, 128),
            "out_ptr": "*bf16",
        },
        4,
    ),
    *(
        (
            linear_trades_hopper.trades,
            {
                "BLOCKS": 40,
                "NB": 14,
                "SPLITS": 3,
                "R": 128,
                "STAGES": 4,
                "HOLD": False,
                "EACH": 1,
                "REGISTERS": linear_trades_hopper.REGISTERS,
                "CLUSTER": cluster,
            },
            {
                "w_desc": block("fp8e4nv", 128, 128),
                "x_desc": block("fp8e4nv", 128, 128),
                "out_ptr": "*bf16",
            },
            4,
        )
        for cluster in (False, True)
    ),
    *(
        (
            linear_wide_hopper.wide,
            {**WIDE, "COLUMNS": 2304, "QUANTISE": not gated, "GATED": gated},
            {
                "w_desc": block("fp8e4nv", 64 if gated else 128, 128),
                "x_desc": block("fp8e4nv", 128, 128),
                "code_ptr": "*fp8e4nv",
                "out_ptr": "*fp8e4nv" if gated else "*bf16",
            },
            8,
        )
        for gated in (False, True)
    ),
    *(
        (
            linear_bulk_hopper.bulk,
            {**BULK, "COLUMNS": 2304, "STAGES": 3, "AHEAD": 5, "P": 32, "QUANTISE": True, "GATED": gated},
            {"w_desc": block("u8", 64 if gated else 128, 128), "x_desc": block("bf16", 256, 64), **OUT},
            4,
        )
        for gated in (False, True)
    ),
    (
        grouped_bulk_hopper.grouped_bulk,
        {**BULK, "COLUMNS": 4096, "STAGES": 4},
        {"w_desc": block("bf16", 128, 64), "o_desc": block("bf16", 256, 64), **OUT},
        4,
    ),
    (
        experts_hopper.quantise,
        {"BLOCKS": 5},
        {"places_ptr": "*i32", "out_ptr": "*bf16"},
        4,
    ),
    *(
        (
            experts_trades_hopper.products,
            {
                "COLUMNS": columns,
                "GATED": gated,
                "TRADE_REGISTERS": experts_trades_hopper.TRADE_REGISTERS,
                "FETCH_REGISTERS": experts_trades_hopper.FETCH_REGISTERS,
            },
            {
                **dict.fromkeys(("first_desc", "second_desc"), block("i32", 128, 16, swizzle=64)),
                "x_desc": block("bf16", 16, 64),
                **dict.fromkeys(("scale1_ptr", "scale2_ptr"), "*u8"),
                "weight_ptr": "*fp32",
                "out_ptr": "*bf16",
            },
            4,
        )
        for columns, gated in ((5120, True), (2304, False))
    ),
    (
        experts_one_hopper.one_slot,
        {"COLUMNS": 5120, "XS": 256, "STAGES": 4, "GATED": True},
        {
            **dict.fromkeys(("first_desc", "second_desc"), block("u8", 32, 128)),
            "x_desc": block("u8", 16, 128),
            **dict.fromkeys(("weight_ptr", "xs_ptr", "out_scale_ptr"), "*fp32"),
            **dict.fromkeys(("first_scale_ptr", "second_scale_ptr"), "*u8"),
            "out_ptr": "*u8",
        },
        4,
    ),
    (
        experts_one_hopper.one_slot,
        {"COLUMNS": 2304, "XS": 128, "STAGES": 5, "GATED": False},
        {
            **dict.fromkeys(("first_desc", "second_desc"), block("u8", 32, 128)),
            "x_desc": block("u8", 16, 128),
            **dict.fromkeys(("weight_ptr", "xs_ptr", "out_scale_ptr"), "*fp32"),
            **dict.fromkeys(("first_scale_ptr", "second_scale_ptr"), "*u8"),
            "out_ptr": "*bf16",
        },
        4,
    ),
    (
        experts_fp8_hopper.tiles_of_eight,
        {"COLUMNS": 5120, "STAGES": 3, "GATED": True, "SHARED": 16, "EARLY": False, "K": 6},
        {
            **dict.fromkeys(("first_desc", "second_desc"), block("u8", 64, 128, swizzle=128)),
            "shared_desc": block("u8", 64, 128),
            **dict.fromkeys(("x_ptr", "first_scale_ptr", "second_scale_ptr", "shared_scale_ptr"), "*u8"),
            **dict.fromkeys(("weight_ptr", "xs_ptr", "out_scale_ptr"), "*fp32"),
            "out_ptr": "*u8",
            "total_ptr": "*bf16",
        },
        4,
    ),
    (
        experts_fp8_hopper.tiles_of_eight,
        {"COLUMNS": 384, "STAGES": 3, "GATED": False, "SHARED": 8, "EARLY": True, "K": 6},
        {
            **dict.fromkeys(("first_desc", "second_desc"), block("u8", 64, 64, swizzle=64)),
            "shared_desc": block("u8", 64, 128),
            **dict.fromkeys(("x_ptr", "first_scale_ptr", "second_scale_ptr", "shared_scale_ptr"), "*u8"),
            **dict.fromkeys(("weight_ptr", "xs_ptr", "out_scale_ptr"), "*fp32"),
            "out_ptr": "*bf16",
            "total_ptr": "*bf16",
        },
        4,
    ),
    (
        compress_hopper.entries,
        {
            "ROWS": 128,
            "PAGE": 45_568,
            "MAIN": 0,
            "MAIN_SCALES": 32_768,
            "INDEX": 36_864,
            "INDEX_SCALES": 45_056,
            "HALF_ROPE": 32,
            "M": 2,
        },
        {"key_desc": block("bf16", 128, 64)},
        8,
    ),
    (
        mhc_hopper.sublayer_tiles,
        {"T": 64, "SPLITS": 16, "SP2": 16, "TS": 4, "STAGES": 2, "NW": 8, "CODES": True},
        {
            **dict.fromkeys(("x_desc", "y_desc", "out_desc", "row_desc"), block("bf16", 64, 64)),
            **dict.fromkeys(("scale_ptr", "new_pre_ptr", "new_post_ptr", "new_comb_ptr"), "*fp32"),
            "rows_ptr": "*fp64",
            "codes_ptr": "*fp8e4nv",
            "code_scale_ptr": "*u8",
        },
        8,
    ),
    (
        mhc_many_hopper.sublayer_rounds,
        {"SPLITS": 8, "SP2": 8, "TS": 8, "SLOTS": 12, "CODES": True},
        {
            **dict.fromkeys(("x_desc", "y_desc", "out_desc", "row_desc"), block("bf16", 64, 64)),
            **dict.fromkeys(("scale_ptr", "new_pre_ptr", "new_post_ptr", "new_comb_ptr"), "*fp32"),
            "rows_ptr": "*fp64",
            "codes_ptr": "*fp8e4nv",
            "code_scale_ptr": "*u8",
        },
        8,
    ),
    (
        mhc_few_hopper.sublayer_few,
        {"T": 1, "SPLITS": 40, "SP2": 64, "NW": 4, "CODES": True, "PENDING": True, "LEAVES": True},
        {**MIXED, "rows_ptr": "*fp64", "codes_ptr": "*fp8e4nv", "code_scale_ptr": "*u8", "out_ptr": "*bf16"},
        4,
    ),
    (
        mhc_few_hopper.sublayer_few,
        {"T": 4, "SPLITS": 40, "SP2": 64, "NW": 4, "CODES": False, "PENDING": False, "LEAVES": False},
        {**MIXED, "rows_ptr": "*fp64", "codes_ptr": "*fp8e4nv", "code_scale_ptr": "*u8", "out_ptr": "*bf16"},
        4,
    ),
    (mhc_few_hopper.settle_few, {"T": 1, "SPLITS": 40, "SP2": 64, "NW": 4}, MIXED, 4),
    (
        router_one_hopper.route_one,
        {"R": 4, "V": 8, "CHUNKS": 5, "PROGRAMS": 96, "E": 512, "TILE": 8, "COLUMNS": False},
        {**dict.fromkeys(("bias_ptr", "weights_ptr", "powers_ptr"), "*fp32"), **ROUTED},
        4,
    ),
    (
        router_rows_hopper.choose_rows,
        {"E": 512, "R": 4},
        {**dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32"), "scale": "fp32"},
        4,
    ),
    (
        router_tiles_hopper.logit_parts,
        {"COLUMNS": 5120, "SPLITS": 5, "M": 64, "R": 128, "STAGES": 4},
        {"x_desc": block("bf16", 64, 64), "gate_desc": block("bf16", 128, 64)},
        4,
    ),
    *(
        (
            router_tiles_hopper.sorted_rows,
            {"E": 512, "R": 4, "PARTS": 5, "CHOICES": 128, "T": together, "P": size, "BANDS": together == 8},
            {**dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr", "scales_ptr"), "*fp32"), **seen},
            4,
        )
        for together, size, seen in ((8, 32, {"seen_ptr": "*u8"}), (80, 5, OUT))
    ),
    *(
        (
            select_slices_triton.top_short,
            {"CHUNKS": 4, "FEW": 2048, "MODE": 0, "ALIGNED": aligned},
            {"key_ptr": "*i32"},
            32,
        )
        for aligned in (False, True)
    ),
    (
        select_slices_triton.slice_collect,
        {"CHUNKS": 1, "BEST": 4096, "LIMIT": 4096, "MODE": 1},
        {"key_ptr": "*i32"},
        32,
    ),
    *(
        (
            select_many_triton.guess_bound,
            {"FEW": 2048, "EACH": 16, "MODE": 0, "ALIGNED": aligned},
            {"guess_ptr": "*fp32"},
            32,
        )
        for aligned in (False, True)
    ),
    (select_many_triton.filter_row, {"FEW": 2048, "B": 256, "MODE": 0}, {}, 8),
    (
        compress_triton._window,
        {"HALF": 256, "HALF_ROPE": 32, "R": 1, "NORM": True},
        {"k_ptr": "*i32"},
        4,
    ),
    (
        mhc_triton._boundary,
        {"HC": 4, "B": 1024, "EXPAND": True, "COLLAPSE": True, "NORM": True},
        {"out_ptr": "*bf16"},
        4,
    ),
    (
        latents_triton._latents,
        {
            "Q": 1280,
            "B": 2048,
            "HALF": 256,
            "HALF_ROPE": 32,
            "FIRST": 1,
            "SECOND": 8,
            "STAGED": True,
            "WIDE": True,
            "ROW_BLOCK": 1024,
            "OVERLAPS": True,
        },
        {
            **dict.fromkeys(("query_weight_ptr", "key_weight_ptr", "query_ptr", "first_ptr"), "*bf16"),
            **dict.fromkeys(("place_ptr", "source_ptr", "target_ptr", "saved_ptr"), "*i64"),
            **dict.fromkeys(("second_ptr", "second_scale_ptr"), "*u8"),
        },
        4,
    ),
    (
        wide_keys_triton.expand,
        {
            "PAGE": 227_840,
            "PAYLOAD": 0,
            "SCALES": 32_768,
            "LINES": 128,
            "WORDS": 64,
            "R": 16,
            "OVERLAPS": True,
        },
        {"word_ptr": "*i32", "byte_ptr": "*u8"},
        4,
    ),
    (
        router_triton._route,
        {
            "T": 16,
            "BE": 64,
            "BK": 128,
            "LANES": 6,
            "SPLITS": 20,
            "SP2": 32,
            "E": 512,
            "R": 1,
            "RQ": 8,
            "TILE": 8,
            "P": 128,
            "ALONE": False,
            "OWN": False,
            "PDL": True,
        },
        {
            "gate_ptr": "*bf16",
            "bands_ptr": "*i32",
            "powers_ptr": "*fp32",
            **dict.fromkeys(("bias_ptr", "weights_ptr"), "*fp32"),
            "scale": "fp32",
        },
        8,
    ),
    (
        decode_tables_triton._tables,
        {"W": 128, "M": 2, "R0": 1, "R1": 2, "R2": 1, "R3": 1},
        dict.fromkeys(("fields_ptr", "place_ptr", "entry_ptr", "first_ptr", "kept_ptr"), "*i64"),
        1,
    ),
    (
        sampling_triton._draw,
        {"B": 4096, "CAP": 2048, "SLOTS": 8, "RANK": 1024, "BLOCKS": 32},
        {
            "logits_ptr": "*fp32",
            **dict.fromkeys(("temperature_ptr", "p_ptr", "least_ptr", "out_ptr"), "*fp64"),
            **dict.fromkeys(
                ("seed_ptr", "position_ptr", "k_ptr", "aside_ptr", "dense_ptr", "sums_ptr", "id_ptr"), "*i64"
            ),
        },
        16,
    ),
)


def kind_of(name: str, given: dict[str, str]) -> str:
    """The Triton type of argument `name`."""
    if name in given:
        return given[name]
    stem = name.removesuffix("_ptr")
    if stem == name:
        return SCALARS.get(name, "i32")
    for names, kind in ((BYTES, "*u8"), (FLOATS, "*fp32"), (HALVES, "*bf16")):
        if stem in names:
            return kind
    return "*i32"


def held_once(ttgir: str) -> bool:
    """Whether every tensor that threads count together (`tally`) has each of its elements in one thread."""
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir))
    found = re.findall(
        r"(?:barrier\.red|redux).* : tensor<(\d+)xi32, (?:#ttg\.slice<\{dim = (\d), parent = )?(#\w+)", ttgir
    )
    for size, dim, name in found:
        parts = re.findall(r"\w+ = \[([\d, ]+)\]", layouts[name])[:3]  # a thread's, a warp's, all warps'
        reach = [
            math.prod(sizes) for sizes in zip(*(map(int, part.split(",")) for part in parts), strict=True)
        ]
        thread = int(parts[0].split(",")[int(dim)]) if dim else 1
        others = reach.pop(int(dim)) // thread if dim else 1
        if others > 1 or math.prod(reach) > int(size):
            return False
    return True


def descriptors_named(ptx: str) -> bool:
    """Whether every parameter that is prefetched as a bulk copy's descriptor is one."""
    named = re.findall(r"prefetch\.param\.tensormap \[(\w+)\]", ptx)
    return all(re.search(rf"\.param \.align 64 \.b8 {name}\[128\]", ptx) for name in named)


def ring_first(name: str, ptx: str) -> bool:
    """Whether the ring of `products`, whose barriers it finds by address, begins its shared memory."""
    found = re.search(r", %r\d+, (\d+);\s*// begin inline asm\s*@%p\d+ mbarrier\.init\S* \[%r\d+\], 16;", ptx)
    return name != "products" or (found is not None and int(found[1]) == experts_trades_hopper.BARRIERS.value)


def main() -> None:
    """Compiles every case, or with two numbers I and N every Nth from the Ith on."""
    first, step = map(int, sys.argv[1:] or ("0", "1"))
    for kernel, constants, given, warps in CASES[first::step]:
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else kind_of(n, given) for n in names}
        known = ("stride", "count") if constants.get("ALIGNED") else ()
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if signature[n].startswith("*") or n in known
        }
        source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
            kernel, signature, constants, aligned
        )
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        ptx = done.asm["ptx"]
        line = {
            "name": kernel.__name__,
            "wgmma": "wgmma" in ptx,
            "cubin": len(done.asm["cubin"]),
            "shared": done.metadata.shared,
            "held_once": held_once(done.asm["ttgir"]),
            "descriptors": descriptors_named(ptx),
            "ring_first": ring_first(kernel.__name__, ptx),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
