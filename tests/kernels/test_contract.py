"""Contracts: what is refused, and that the message names the argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cedar.kernels.compress import pool_groups
from cedar.kernels.contract import Contract, ContractError
from cedar.kernels.experts import grouped_experts, swiglu_prepared
from cedar.kernels.fp4 import pack_fp4_e4m3, unpack_fp4_e8m0
from cedar.kernels.fp8 import quantize_fp8, unpack_window_rows
from cedar.kernels.linear import linear_dense, linear_fp8
from cedar.kernels.mhc import mhc_collapse, mhc_mix
from cedar.kernels.norm import rms_norm
from cedar.kernels.prepared import CODES, Prepared
from cedar.kernels.rope import apply_rope, rope_frequencies
from cedar.kernels.router import route
from cedar.kernels.select import candidate_blocks, top_k
from cedar.kernels.sparse_attention import sparse_attention

BF16, U8 = torch.bfloat16, torch.uint8


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_letters_bind_and_must_agree() -> None:
    c = Contract("op")
    c.expect("x", zeros(3, 4, 8), "N H D", BF16)
    c.expect("y", zeros(3, 4), "N D/2", BF16)
    c.expect("z", zeros(2, 7, 8), "... D")
    c.expect("s", zeros(1, 3), "ceil(H/32) ceil(D/3)")
    assert c.dims == {"N": 3, "H": 4, "D": 8}
    with pytest.raises(
        ContractError, match=r"op: w must be \[N, H\] bfloat16, got \[3, 5\] bfloat16 \(with N=3, H=4"
    ):
        c.expect("w", zeros(3, 5), "N H", BF16)
    with pytest.raises(ContractError, match="w must be"):
        c.expect("w", zeros(3, 4, 1), "N H", BF16)
    with pytest.raises(ContractError, match="float32 or float64, got"):
        c.expect("w", zeros(3), "N", torch.float32, torch.float64)


def test_half_of_an_unbound_letter_binds_the_whole() -> None:
    c = Contract("op")
    c.expect("payload", zeros(5, 16, dtype=U8), "N D/2", U8)
    assert c.dims["D"] == 32


def test_devices_must_agree() -> None:
    c = Contract("op")
    c.expect("x", zeros(3), "N")
    with pytest.raises(ContractError, match="y is on meta"):
        c.expect("y", torch.zeros(3, device="meta"), "N")


def product(*, rows: int = 2, **changes: object) -> torch.Tensor:
    """A product of codes [2, 64], with these changes, alone or beside x [rows, 64]."""
    codes = Prepared(zeros(2, 64, dtype=torch.float8_e4m3fn), CODES, zeros(2, 2, dtype=U8))
    codes = codes._replace(**changes)  # type: ignore[arg-type]
    weight = zeros(40, 64, dtype=torch.float8_e4m3fn), zeros(2, 2, dtype=U8)
    return (
        linear_fp8(codes, *weight) if rows == 2 else linear_fp8(zeros(rows, 64), *weight, prepared=(codes,))
    )


MISUSES = {
    "x.scale is missing": lambda: product(scale=None),
    "x.scale must be": lambda: product(scale=zeros(2, 1, dtype=U8)),
    "prepared.scale must be": lambda: product(rows=3, scale=zeros(2, 2, dtype=torch.float32)),
    "x.values must be contiguous": lambda: product(values=zeros(2, 128, dtype=torch.float8_e4m3fn)[:, ::2]),
    "prepared.scale must be contiguous": lambda: product(rows=3, scale=zeros(2, 4, dtype=U8)[:, ::2]),
    "prepared.values must hold x's 192": lambda: product(rows=3),
    "up must be": lambda: swiglu_prepared(zeros(2, 64), zeros(2, 32), 10.0, CODES),
    "gate has I=48": lambda: swiglu_prepared(zeros(2, 48), zeros(2, 48), 10.0, CODES),
    "x has C=33": lambda: quantize_fp8(zeros(2, 33)),
    "x must be": lambda: quantize_fp8(zeros(2, 32, dtype=torch.float32)),
    "x has C=8": lambda: pack_fp4_e4m3(zeros(2, 8)),
    "scales must be": lambda: unpack_fp4_e8m0(zeros(2, 16, dtype=U8), zeros(2, 2, dtype=U8)),
    "scales must have": lambda: unpack_fp4_e8m0(zeros(2, 16, dtype=U8), zeros(3, 1, dtype=U8)),
    "rows must be": lambda: unpack_window_rows(zeros(2, 64, dtype=U8), 64),
    "weight must be": lambda: rms_norm(zeros(2, 8), zeros(9), 1e-6),
    "positions must be": lambda: apply_rope(
        zeros(2, 8), zeros(2, dtype=torch.int32), rope_frequencies(4, 1e4)
    ),
    "x must be \\[N=3": lambda: apply_rope(
        zeros(2, 8), zeros(3, dtype=torch.int64), rope_frequencies(4, 1e4)
    ),
    "x has 8 channels": lambda: apply_rope(
        zeros(2, 8), zeros(2, dtype=torch.int64), rope_frequencies(16, 1e4)
    ),
    "dim must be even": lambda: rope_frequencies(7, 1e4),
    "scale must be": lambda: linear_fp8(
        zeros(2, 64), zeros(40, 64, dtype=torch.float8_e4m3fn), zeros(1, 2, dtype=U8)
    ),
    "expanded must be": lambda: linear_fp8(
        zeros(2, 64), zeros(40, 64, dtype=torch.float8_e4m3fn), zeros(2, 2, dtype=U8), expanded=zeros(40, 64)
    ),
    "x must be \\[..., I\\]": lambda: linear_dense(zeros(2, 63), zeros(40, 64)),
    "gate must be": lambda: pool_groups(
        zeros(2, 2, 8, dtype=torch.float32), zeros(2, 3, 8, dtype=torch.float32)
    ),
    "k must be positive": lambda: top_k(zeros(2, 3, dtype=torch.float32), 0),
    "visible holds 4": lambda: candidate_blocks(
        zeros(1, 3, dtype=torch.float64), torch.tensor([4], dtype=torch.int32), 2, 2
    ),
    "pre must be": lambda: mhc_collapse(zeros(2, 4, 8), zeros(2, 4)),
    "fn must be": lambda: mhc_mix(
        zeros(2, 4, 8), *(zeros(n, dtype=torch.float32) for n in (24, 3, 24)), 1e-6, 1e-6, 20
    ),
    "k must be 1 to 4": lambda: route(zeros(2, 8), zeros(4, 8), zeros(4, dtype=torch.float32), 5, 1.0),
    "ids holds 2": lambda: grouped_experts(
        zeros(1, 32),
        torch.tensor([[2]], dtype=torch.int32),
        zeros(1, 1, dtype=torch.float32),
        *(t for _ in range(3) for t in (zeros(2, 32, 16, dtype=U8), zeros(2, 32, 1, dtype=U8))),
        10.0,
    ),
    "window must be": lambda: sparse_attention(
        zeros(1, 2, 32), *(None,) * 6, zeros(4, 32, dtype=U8), zeros(1, 1, dtype=torch.int32), zeros(2)
    ),
    "entries needs pages": lambda: sparse_attention(
        zeros(1, 2, 32),
        *(None,) * 5,
        zeros(1, 1, dtype=torch.int32),
        zeros(4, 33, dtype=U8),
        zeros(1, 1, dtype=torch.int32),
        zeros(2, dtype=torch.float32),
    ),
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_names_the_argument(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MISUSES[message]()


def test_imports_without_triton() -> None:
    names = sorted(
        p.stem
        for p in (Path(sys.modules[Contract.__module__].__file__ or "").parent).glob("*.py")
        if not p.stem.endswith(("_triton", "_hopper", "__init__"))
    )
    code = "import sys; sys.modules['triton'] = None\n" + "\n".join(
        f"import cedar.kernels.{n}" for n in names
    )
    code += "\nassert not {'ray', 'grpc', 'cedar.model'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
