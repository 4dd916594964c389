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
    compress_triton,
    experts_hopper,
    index_scores_hopper,
    mhc_triton,
    select_triton,
    sparse_attention_hopper,
    sparse_attention_triton,
    weights_hopper,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

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
SCALARS = {"scale": "fp32", "eps": "fp32", "hc_eps": "fp32", "limit": "fp32"}
CASES: tuple[tuple[Any, dict[str, Any], dict[str, str], int], ...] = (
    (
        sparse_attention_hopper.attend_hopper,
        {
            **PAGE,
            "PAYLOAD": 136_704,
            "SCALES": 202_240,
            "TILES": 8,
            "NAMES": 1024,
            "HALF_ROPE": 32,
            "SPLITS": 2,
        },
        {"q_ptr": "*bf16", "out_ptr": "*bf16", "part_ptr": "*fp16"},
        8,
    ),
    (
        sparse_attention_triton._join,
        {"HEADS": 64, "HALF": 256, "HALF_ROPE": 32, "SPLITS": 9, "BH": 4},
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
        index_scores_hopper.prefill_scores,
        {**INDEX, "CHUNK": 256, "BLOCKS": False},
        {"q_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*fp32", "best_ptr": "*fp32"},
        8,
    ),
    (weights_hopper.linear_rows, {"columns": 5120, "KIND": 0, "T": 8, "SPLITS": 4}, {"out_ptr": "*bf16"}, 4),
    (weights_hopper.linear_wide, {"columns": 5120}, {"out_ptr": "*bf16"}, 4),
    (experts_hopper.expert_hidden, {"columns": 5120, "T": 8}, {"weight_ptr": "*fp32", "out_ptr": "*bf16"}, 4),
    (experts_hopper.expert_hidden_wide, {"columns": 5120}, {"weight_ptr": "*fp32", "out_ptr": "*bf16"}, 4),
    (experts_hopper.expert_output, {"columns": 2304, "T": 8}, {"out_ptr": "*bf16"}, 4),
    (select_triton._guess, {"B": 2048, "MODE": 0}, {}, 8),
    (select_triton._filter, {"FEW": 2048, "B": 256, "MODE": 0}, {}, 8),
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
