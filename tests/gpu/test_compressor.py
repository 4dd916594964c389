"""The compressor on a CUDA device: its quotients one by one, its bytes against another kernel's."""

from __future__ import annotations

import pytest
import torch
import triton
from cedar.kernels import compress_hopper, compress_triton
from cedar.kernels.rope import rope_table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, PAGE = 128, 45_568
PLANES = ((0, 256, ROWS), (32_768, 32, ROWS), (36_864, 64, ROWS), (45_056, 4, ROWS))
LINE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def quotients(a_ptr, first_ptr, second_ptr, count):  # type: ignore[no-untyped-def]
    """Grid (ceil(count / 512)): 1 / (1 + a) and a / (1 + a) as the compressor makes them."""
    at = gl.program_id(0) * 512 + gl.arange(0, 512, layout=LINE)
    a = gl.load(a_ptr + at, mask=at < count, other=0.5)
    inverse = compress_hopper.reciprocal(a + 1.0)
    gl.store(first_ptr + at, inverse, mask=at < count)
    gl.store(second_ptr + at, compress_hopper.divided(a, inverse, a + 1.0), mask=at < count)


def check_quotients(a: torch.Tensor) -> None:
    first, second = torch.full_like(a, torch.nan), torch.full_like(a, torch.nan)
    quotients[(triton.cdiv(len(a), 512),)](a, first, second, len(a), num_warps=4, enable_fp_fusion=False)
    total = (a + 1.0).double()
    assert torch.equal(first, (1.0 / total).float())
    assert torch.equal(second, (a.double() / total).float())


def test_all_quotients_are_correctly_rounded() -> None:
    """Every divisor of [1, 2], and every dividend that leaves a quotient other than itself."""
    check_quotients(torch.arange(0x3F800000, 0x40000001, device="cuda").int().view(torch.float32) - 1.0)
    for start in range(0x32800000, 0x3F800000, 1 << 24):  # from 2^-26 to 1
        bits = torch.arange(start, min(start + (1 << 24), 0x3F800001), device="cuda")
        check_quotients(bits.int().view(torch.float32))


def unsigned_zeros(payload: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 with -0 as 0: what is left of a small negative value is -0 here, as in the reference."""
    low = torch.where(payload & 15 == 8, payload & 0xF0, payload)
    return torch.where(low & 0xF0 == 0x80, low & 15, low)


@pytest.mark.parametrize("groups", [1, 7, 16, 17, 33, 129, 1000])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "wide", "large"])
def test_entries_are_those_of_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, groups: int, tokens: int, kind: str
) -> None:
    """Main rows byte for byte, index rows but for keys whose product, added up otherwise, rounds so."""
    g = torch.Generator("cuda").manual_seed(groups + tokens)
    norm, key, key_norm = (
        torch.randn(*shape, device="cuda", generator=g).to(torch.bfloat16)
        for shape in ((512,), (128, 512), (128,))
    )
    kv = torch.randn(groups, tokens, 512, device="cuda", generator=g)
    gate = torch.randn(groups, tokens, 512, device="cuda", generator=g) * 3
    if kind == "wide":
        kv *= torch.exp2(torch.randint(-30, 30, kv.shape, device="cuda", generator=g).float())
        kv[::5] = 0
    if kind == "large":
        kv *= 5000
    source = (kv, gate) if tokens == 2 else (kv[:, 0].to(torch.bfloat16), None)
    pages = torch.full((groups // ROWS + 3, PAGE), 0xA5, dtype=torch.uint8, device="cuda")
    table = torch.randperm(len(pages), device="cuda", generator=g)[: groups // ROWS + 1].to(torch.int32)[None]
    seq = torch.zeros(groups, dtype=torch.int32, device="cuda")
    entry = torch.arange(groups, dtype=torch.int32, device="cuda")
    entry[2::3] = -1
    frequencies = 1.0 / 160_000.0 ** (torch.arange(0, 64, 2, device="cuda", dtype=torch.float32) / 64)
    rope = rope_table(torch.arange(groups, device="cuda") * tokens, frequencies)
    want = pages.clone()
    compress_triton.write_entries(*source, norm, key, key_norm, rope, 1e-20, pages, PLANES, table, seq, entry)
    monkeypatch.setattr(compress_triton, "hopper", lambda index: False)
    compress_triton.write_entries(*source, norm, key, key_norm, rope, 1e-20, want, PLANES, table, seq, entry)
    main = PLANES[0][1] * ROWS
    assert torch.equal(unsigned_zeros(pages[:, :main]), unsigned_zeros(want[:, :main]))
    assert torch.equal(pages[:, main : PLANES[2][0]], want[:, main : PLANES[2][0]])
    assert int((unsigned_zeros(pages) != unsigned_zeros(want)).sum()) <= 68 * (2 + 0.02 * groups)
