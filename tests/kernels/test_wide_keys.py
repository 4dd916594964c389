"""Keys expanded once for a chunk: references against the packed formats, kernels against references bit for
bit, attention that reads them against attention on packed keys.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cedar.kernels import fp8_ref, wide_keys, wide_keys_ref
from cedar.kernels.contract import ContractError
from cedar.kernels.fp4 import unpack_fp4_e4m3
from cedar.kernels.fp8 import pack_window_rows, unpack_window_rows
from cedar.kernels.latents import Staging, norm_latents
from cedar.kernels.paging import PageRangeError, Plane
from cedar.kernels.rope import rope_frequencies, rope_table
from cedar.kernels.sparse_attention import sparse_attention
from cedar.kernels.wide_keys import Shape, WideKeys, expand_entries, pays

from .packed_memory import packed_memory
from .test_sparse_attention import call, case

CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def pages_of(width: int, rows: int, pages: int, offset: int = 16) -> tuple[torch.Tensor, Plane, Plane]:
    """Random payloads, and every scale that is a number."""
    planes = Plane(offset, width // 2, rows), Plane(offset + rows * width // 2, width // 16, rows)
    end = planes[1].offset + rows * planes[1].row_bytes
    memory = torch.randint(0, 256, (pages, -(-end // 4) * 4 + 4), dtype=torch.uint8)
    memory[:, planes[1].offset : end] = torch.randint(
        0, 0x7F, (pages, end - planes[1].offset), dtype=torch.uint8
    )
    return memory, *planes


def test_every_entry_is_held_exactly() -> None:
    """All products of an E2M1 code and a scale, in one page."""
    payload = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).expand(127, 32, 8).reshape(127, 256)
    scales = torch.arange(127, dtype=torch.uint8).unsqueeze(1).expand(127, 32)
    pages = torch.cat((payload.flatten(), scales.flatten())).unsqueeze(0)
    planes = Plane(0, 256, 127), Plane(127 * 256, 32, 127)
    wide = expand_entries(pages, *planes, torch.zeros(1, 1, dtype=torch.int32), 127)
    want = unpack_fp4_e4m3(payload, scales).double()
    assert torch.equal(wide_keys_ref.values(wide[0]), want)
    assert bool((bits(wide) < 0).any())


def test_window_keys_are_exact_where_fp16_holds_them() -> None:
    """Every byte with every scale: exact, rounded, none, or with the greatest scale there is."""
    byte, code = torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    byte[0x7F], byte[0xFF] = 0, 0  # NaN
    rows = torch.cat((byte.view(1, 8, 32).expand(256, 8, 32), code.view(256, 1, 1).expand(256, 8, 1)), 2)
    wide = wide_keys_ref.expand_window(rows, 32)
    found, power = wide_keys_ref.values(wide), torch.arange(256) - 127
    values = byte.view(torch.float8_e4m3fn).double().view(8, 32) * torch.exp2(power.double()).view(256, 1, 1)
    assert torch.equal(found[127 - 8 : 142], values[127 - 8 : 142])
    assert bool(((found - values)[102:142].abs() <= 2.0**-18).all())
    assert bool((wide[:102] == 0).all())
    assert torch.equal(bits(wide[142:]), bits(wide[141:142]).expand(114, 8, 32))


@CPU
@pytest.mark.parametrize(("width", "rows", "pages"), [(64, 16, 9), (512, 8, 5), (16, 3, 4), (128, 1, 7)])
def test_the_kernel_expands_entries_bit_for_bit(width: int, rows: int, pages: int) -> None:
    pytest.importorskip("triton")
    from cedar.kernels import wide_keys_triton

    torch.manual_seed(width)
    memory, *planes = pages_of(width, rows, pages)
    assert wide_keys_triton.fits(memory, tuple(planes))
    table = torch.randint(-3, pages + 3, (3, 4), dtype=torch.int32)  # some of them outside
    for count in (0, 1, rows * 2, rows * 4 - 1, rows * 4):
        want = expand_entries(memory, *planes, table, count)
        for numbers in (table, table.long()):
            got = wide_keys_triton.expand_entries(memory, tuple(planes), numbers, count)
            assert got.shape == (3, count, width)
            assert torch.equal(bits(got), bits(want))


@CPU
def test_what_the_kernel_does_not_take() -> None:
    pytest.importorskip("triton")
    from cedar.kernels import wide_keys_triton

    for width, offset, wanted in ((64, 16, True), (64, 18, False), (96, 16, False)):
        memory, *planes = pages_of(width, 4, 3, offset)
        assert wide_keys_triton.fits(memory, tuple(planes)) is wanted


@CPU
@pytest.mark.parametrize("staged", [False, True])
def test_norm_latents_expands_what_it_gives_the_window(staged: bool) -> None:
    """Own keys and, in a chunk, what the rings held: the reference expands rows that were written, the kernel
    equals it bit for bit. Keys of all magnitudes: some lose bits, some vanish, some have too great a scale.
    """
    pytest.importorskip("triton")
    from cedar.kernels import latents_ref, latents_triton

    g = torch.Generator().manual_seed(5)
    latents = torch.randn(5, 96 + 64, generator=g).bfloat16()
    spread = torch.exp2(torch.linspace(-40, 40, 64))
    query_weight, key_weight = torch.rand(96, generator=g).bfloat16(), spread.bfloat16()
    rope = rope_table(torch.arange(5) * 977, rope_frequencies(16, 10_000.0))
    rings = torch.randint(0, 256, (12, 66), dtype=torch.uint8, generator=g)
    staging = Staging(
        rings,
        torch.tensor([4, -1, 6, 7, -1, -1, 2, -1]),
        torch.tensor([5, -1, 3, 0, 1]),
        torch.tensor([1, 0, 7, 4, 5]),
    )
    places = torch.arange(8, 13) if staged else torch.tensor([12, -1, 0, 2, 5])
    given = (latents, query_weight, key_weight, rope, 1e-20)
    out = []
    for run in (latents_ref.norm_latents, latents_triton.norm_latents):
        window = torch.full((13, 66), 9, dtype=torch.uint8)
        wide = torch.full((13, 64), 7.0, dtype=torch.float16)
        moves = staging._replace(rings=rings.clone()) if staged else None
        orders = ((),) if run is latents_triton.norm_latents else ()
        run(*given, window, places, *orders, moves, wide)
        out.append((window, wide))
    (window, wide), (found, got) = out
    assert torch.equal(found, window)
    assert torch.equal(bits(got), bits(wide))
    untouched = torch.ones(13, dtype=torch.bool) if not staged else torch.zeros(13, dtype=torch.bool)
    untouched[places[places >= 0]] = False
    assert bool((wide[untouched] == 7.0).all())
    assert torch.equal(bits(wide[~untouched]), bits(wide_keys_ref.expand_window(window[~untouched], 64)))
    codes = window[~untouched][:, 64:]
    assert bool((codes > 141).any())
    assert bool((codes < 102).any()) == staged
    if staged:
        assert torch.equal(window[:8], rings[[4, 5, 6, 7, 0, 1, 2, 3]])


@pytest.mark.parametrize("lengths", [[40, 9, 1], [70]])
def test_attention_reads_wide_keys_as_it_does_packed_ones(lengths: list[int]) -> None:
    m, a = case(33, 4, 64, 12, 16, lengths, seed=9)
    wide = WideKeys(
        expand_entries(m.pages, m.planes.main_payload, m.planes.main_scales, m.table, max(lengths)),
        wide_keys_ref.expand_window(a["window"], 64),
    )
    where = (m.pages, m.planes.main_payload, m.planes.main_scales, m.table, a["seq"], a["entries"])
    rest = (a["window"], a["window_rows"], a["sink"], None)
    want = call(m, a)
    assert torch.equal(sparse_attention(a["q"], *where, *rest, wide), want)
    assert wide.entries is not None
    other = sparse_attention(a["q"], *where, *rest, wide._replace(entries=wide.entries.flip(1).contiguous()))
    assert not torch.equal(other, want)
    other = sparse_attention(a["q"], *where, *rest, wide._replace(window=wide.window.flip(0).contiguous()))
    assert not torch.equal(other, want)
    near = sparse_attention(a["q"], *(None,) * 6, *rest)
    for each in (wide, wide._replace(entries=None)):
        assert torch.equal(sparse_attention(a["q"], *(None,) * 6, *rest, each), near)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w._replace(entries=None), "wide.entries must be given"),
        (lambda w: w._replace(entries=w.entries.float()), "wide.entries must be"),
        (lambda w: w._replace(entries=w.entries[..., :32]), "wide.entries must be"),
        (lambda w: w._replace(entries=w.entries.mT.contiguous().mT), "wide.entries must be contiguous"),
        (lambda w: w._replace(window=w.window.bfloat16()), "wide.window must be"),
        (lambda w: w._replace(window=w.window[1:]), "wide.window must be"),
        (lambda w: w._replace(window=w.window.T.contiguous().T), "wide.window must be contiguous"),
    ],
)
def test_misuse_of_wide_keys_is_refused(change: object, message: str) -> None:
    m, a = case(3, 4, 64, 5, 9, [24, 3], seed=7)
    wide = WideKeys(
        expand_entries(m.pages, *m.planes[:2], m.table, 24), wide_keys_ref.expand_window(a["window"], 64)
    )
    where = (m.pages, *m.planes[:2], m.table, a["seq"], a["entries"])
    with pytest.raises(ContractError, match=message):
        sparse_attention(
            a["q"],
            *where,
            a["window"],
            a["window_rows"],
            a["sink"],
            None,
            change(wide),  # type: ignore[operator]
        )


def test_entries_that_were_not_expanded_are_named() -> None:
    m, a = case(3, 4, 64, 5, 9, [24], seed=7)
    a["entries"][:] = 20
    wide = WideKeys(
        expand_entries(m.pages, *m.planes[:2], m.table, 20), wide_keys_ref.expand_window(a["window"], 64)
    )
    where = (m.pages, *m.planes[:2], m.table, a["seq"], a["entries"])
    with pytest.raises(PageRangeError, match="entries holds 20"):
        sparse_attention(a["q"], *where, a["window"], a["window_rows"], a["sink"], None, wide)


def test_misuse_of_the_expansion_is_refused() -> None:
    m = packed_memory([20], 64, 32, 8, seed=1)
    payload, scales = m.planes[:2]
    with pytest.raises(ContractError, match="count is 33"):
        expand_entries(m.pages, payload, scales, m.table, 33)
    with pytest.raises(ContractError, match="scale_plane has rows of 4 bytes"):
        expand_entries(m.pages, payload._replace(row_bytes=16), scales, m.table, 8)
    with pytest.raises(ContractError, match="page_table must be"):
        expand_entries(m.pages, payload, scales, m.table.float(), 8)
    latents, weight = torch.zeros(2, 128).bfloat16(), torch.ones(64).bfloat16()
    rope = (torch.ones(2, 1), torch.zeros(2, 1))
    window = pack_window_rows(torch.zeros(3, 64).bfloat16())
    for wide, message in (
        (torch.zeros(2, 64).half(), "wide must be"),
        (torch.zeros(3, 64), "wide must be"),
        (torch.zeros(64, 3).half().T, "wide must be contiguous"),
    ):
        with pytest.raises(ContractError, match=message):
            norm_latents(latents, weight, weight, rope, 1e-20, window, torch.arange(2), wide=wide)


def test_when_a_chunk_is_worth_it() -> None:
    """Flash's chunks are at every length of a prompt's encoder half; small steps and small shares are not."""
    for tokens in (256, 512, 4096, 65_536, 1_048_576):
        assert pays(min(tokens, 4096), tokens // 2, 6, 512)
    assert not pays(255, 0, 1, 512)
    assert not pays(128, 65_536, 20, 512)
    assert pays(4096, 0, 1, 512)
    assert not pays(256, 524_288, 6, 512)  # 210 us for 123
    assert pays(4096, 1 << 19, 6, 512)
    assert not pays(4096, 1 << 20, 20, 512)  # 1 GiB
    assert pays(4096, 655_360, 20, 512)
    assert not pays(4096, 655_361, 20, 512)


@pytest.mark.parametrize("width", [128, 512])
def test_growing_prompts_ask_for_few_sizes(width: int) -> None:
    """Each chunk of a long prompt expands more than the one before."""
    most = wide_keys.MOST_BYTES // (2 * width)
    for step in (1, 127, 2048):
        wanted = range(0, most + 1, max(step, most // 5000))
        asked = {rows: wide_keys.rows_asked_for(rows, width) for rows in wanted}
        assert all(rows <= room <= max(1, min(2 * rows, most)) for rows, room in asked.items())
        assert sum(set(asked.values())) <= 3 * most
        assert len(set(asked.values())) <= 24
    assert wide_keys.rows_asked_for(most + 1, width) == most + 1


def test_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper, and for the shapes that it takes."""
    from cedar.kernels import linear_triton

    flash, sizes = Shape(64, 512, 128, 32), {"entries": 2048, "layers": 6}
    here = torch.zeros(1)
    assert not wide_keys.expands(here, flash, rows=4096, **sizes)
    card = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    for hopper in (False, True):
        monkeypatch.setattr(linear_triton, "hopper", lambda index, hopper=hopper: index == 1 and hopper)
        assert wide_keys.expands(card, flash, rows=4096, **sizes) is hopper
        assert not wide_keys.expands(card, flash, rows=100, **sizes)
        for other in ({"heads": 8}, {"width": 128}, {"window": 129}, {"window": 0}, {"half_rope": 33}):
            assert not wide_keys.expands(card, flash._replace(**other), rows=4096, **sizes)


def test_window_rows_of_real_keys_are_near_what_is_stored() -> None:
    keys = (
        torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
        * torch.exp2(-torch.arange(50.0) / 4)[:, None]
    )
    rows = pack_window_rows(keys.bfloat16())
    wide = wide_keys_ref.values(wide_keys_ref.expand_window(rows, 64))
    assert bool(((wide - unpack_window_rows(rows, 64).double()).abs() <= 2.0**-18).all())
    assert fp8_ref.GROUP == 32
