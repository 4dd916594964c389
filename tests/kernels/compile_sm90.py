"""Compiles the kernels for sm_90 without running them: ``python -m tests.kernels.compile_sm90``; a line of
JSON each.

In a process of its own, because the interpreter, once chosen, stays.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from cedar.kernels import (
    compress_hopper,
    compress_triton,
    decode_tables_triton,
    experts_hopper,
    experts_one_hopper,
    feed_forward_hopper,
    index_scores_fp8_triton,
    index_scores_hopper,
    latents_triton,
    linear_hopper,
    mhc_hopper,
    mhc_triton,
    router_triton,
    sampling_triton,
    select_many_triton,
    select_slices_triton,
    sparse_attention_hopper,
    sparse_attention_parts_triton,
    weights_hopper,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

PAGE = {"ROWS": 256, "PAGE": 227_840}
INDEX = {**PAGE, "PAYLOAD": 210_432, "SCALES": 226_816}
BYTES = ("pages", "window", "q", "q_scale", "weight", "scale", "w1", "s1", "w3", "s3", "w2", "s2", "ring")
FLOATS = (
    "cos",
    "sin",
    "sink",
    "lse",
    "out32",
    "part",
    "guess",
    "scores",
    "kv",
    "gate",
    "post",
    "comb",
    "pre",
    "fn",
    "base",
)
HALVES = ("x", "norm", "key", "key_norm", "y", "row")
SCALARS = {"scale": "fp32", "eps": "fp32", "mix_eps": "fp32", "hc_eps": "fp32", "limit": "fp32"}


def block(kind: str, *shape: int, swizzle: int = 128) -> str:
    """The type of a descriptor of blocks of that shape."""
    layout = NVMMASharedLayout(swizzle, 32 if kind == "i32" else 16, len(shape))
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
    (
        sparse_attention_parts_triton.join_parts,
        {"HALF": 256, "HALF_ROPE": 32, "SPLITS": 9, "BH": 4, "WAIT": True},
        {"part_ptr": "*fp16", "out_ptr": "*bf16"},
        4,
    ),
    (
        index_scores_hopper.decode_scores,
        {**INDEX, "KEYS": 64, "TOKENS": 1, "GATHER": False, "BLOCKS": True},
        {"weight_ptr": "*fp32", "out_ptr": "*fp32", "best_ptr": "*fp32"},
        4,
    ),
    (
        index_scores_fp8_triton.score_one,
        {**INDEX, "BLOCKS": True, "STAGES": 3},
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
        weights_hopper.linear_rows,
        {"columns": 4096, "T": 8, "SPLITS": 4},
        {"weight_ptr": "*bf16", "out_ptr": "*bf16"},
        4,
    ),
    (
        linear_hopper.stream,
        {
            "COLUMNS": 5120,
            "NB": 5,
            "SPLITS": 8,
            "N": 16,
            "STAGES": 4,
            "FUSED": True,
            "WARPS": 8,
            "KQ": 1,
        },
        {"w_desc": block("i32", 1, 1, 128, 32), "x_desc": block("bf16", 2, 16, 64), "out_ptr": "*bf16"},
        8,
    ),
    (
        experts_hopper.hidden,
        {"COLUMNS": 5120, "N": 64, "EXTRA": 16, "MT": 2, "STAGES": 3},
        {
            "w1_desc": block("i32", 128, 16, swizzle=64),
            "w3_desc": block("i32", 128, 16, swizzle=64),
            "weight_ptr": "*fp32",
            "out_ptr": "*bf16",
        },
        4,
    ),
    (
        experts_hopper.output,
        {"COLUMNS": 2304, "N": 64, "EXTRA": 16, "MT": 4, "STAGES": 3},
        {"w2_desc": block("i32", 256, 16, swizzle=64), "out_ptr": "*bf16"},
        4,
    ),
    (
        experts_one_hopper.hidden_one,
        {"COLUMNS": 5120, "STAGES": 5},
        {
            "w1_desc": block("i32", 2, 32, 16, swizzle=64),
            "w3_desc": block("i32", 2, 32, 16, swizzle=64),
            "weight_ptr": "*fp32",
            "out_ptr": "*bf16",
        },
        4,
    ),
    (
        experts_one_hopper.output_one,
        {"COLUMNS": 2304, "STAGES": 8},
        {"w2_desc": block("i32", 64, 16, swizzle=64), "out_ptr": "*bf16"},
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
        {"SPLITS": 4, "SP2": 4, "TS": 16, "STAGES": 2},
        {
            "x_desc": block("bf16", 64, 64),
            "y_desc": block("bf16", 64, 64),
            "out_desc": block("bf16", 64, 64),
            "scale_ptr": "*fp32",
            "rows_ptr": "*fp64",
            "new_pre_ptr": "*fp32",
            "new_post_ptr": "*fp32",
            "new_comb_ptr": "*fp32",
        },
        4,
    ),
    (select_slices_triton.top_short, {"CHUNKS": 4, "FEW": 2048, "MODE": 0}, {"key_ptr": "*i32"}, 32),
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
            "SECOND": -1,
            "STAGED": True,
            "ROW_BLOCK": 1024,
        },
        {
            **dict.fromkeys(
                ("query_weight_ptr", "key_weight_ptr", "query_ptr", "first_ptr", "second_ptr"), "*bf16"
            ),
            **dict.fromkeys(("place_ptr", "source_ptr", "target_ptr", "saved_ptr"), "*i64"),
        },
        4,
    ),
    (
        router_triton._route,
        {"T": 16, "BE": 64, "BK": 128, "SPLITS": 10, "E": 512, "R": 16, "TILE": 8, "P": 128},
        {
            **dict.fromkeys(("gate_ptr", "x4_ptr", "x8_ptr"), "*bf16"),
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
        feed_forward_hopper.hidden_rows,
        {"columns": 5120, "T": 8},
        {
            **dict.fromkeys(("x4_ptr", "x8_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("w13_ptr", "s13_ptr"), "*u8"),
            "weight_ptr": "*fp32",
        },
        4,
    ),
    (
        feed_forward_hopper.output_rows,
        {"columns": 2304, "T": 8},
        {
            **dict.fromkeys(("out_ptr", "row_ptr"), "*bf16"),
            **dict.fromkeys(("shared_ptr", "shared_scale_ptr"), "*u8"),
        },
        4,
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


def main() -> None:
    """Compiles every case."""
    for kernel, constants, given, warps in CASES:
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else kind_of(n, given) for n in names}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")
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
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
