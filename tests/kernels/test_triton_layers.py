"""Packers, linears, experts, mHC, router and Engram gate in Triton's interpreter, against the references."""

from __future__ import annotations

import pytest
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
)
from cedar.kernels.compress import Entries, EntryPlanes, write_entries
from cedar.kernels.paging import Plane
from cedar.kernels.prepared import CODES, NATURAL
from cedar.kernels.rope import rope_frequencies, rope_table

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")

EPS = 1e-20


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("e4m3", [True, False])
def test_packed_fp4_is_the_reference_bit_for_bit(e4m3: bool) -> None:
    from cedar.kernels import compress_triton

    x = (normal(9, 64) * torch.exp(normal(9, 1) * 4)).bfloat16()
    x[0] = 0
    want = fp4_ref.pack_e4m3(x) if e4m3 else fp4_ref.pack_e8m0(x)
    for got, part in zip(compress_triton.pack_fp4(x, e4m3), want, strict=True):
        assert torch.equal(got, part)


def test_fp8_is_read_back_bit_for_bit() -> None:
    from cedar.kernels import fp8_triton

    q = torch.randint(0, 256, (7, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    q[(q & 0x7F) == 0x7F] = 0  # the two NaNs
    scale = torch.randint(100, 140, (7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    q8 = q.view(torch.float8_e4m3fn)
    assert torch.equal(fp8_triton.dequantize(q8, scale), fp8_ref.dequantize(q8, scale))


def test_window_rows_go_to_their_places_bit_for_bit() -> None:
    from cedar.kernels import compress_triton

    k, norm, positions = normal(5, 64).bfloat16(), normal(64).bfloat16(), torch.arange(5) * 977
    freqs = rope_frequencies(16, 10_000.0)
    ring = torch.zeros(6, 66, dtype=torch.uint8)
    places = torch.tensor([3, 1, 0, -1, 5], dtype=torch.int32)
    compress_triton.write_window(k, norm, rope_table(positions, freqs), EPS, ring, places)
    want = fp8_ref.pack_rows(rope_ref.rotate(norm_ref.rms_norm(k, norm, EPS), positions, freqs, False))
    assert torch.equal(ring[places[[0, 1, 2, 4]].long()], want[[0, 1, 2, 4]])
    assert not ring[[2, 4]].any()
    assert torch.equal(compress_triton.pack_window_rows(k), fp8_ref.pack_rows(k))


@pytest.mark.parametrize("group", [1, 2])
def test_entries_go_straight_into_their_pages(group: int) -> None:
    from cedar.kernels import compress_triton

    count, width, key_width, rows = 5, 64, 32, 8
    plane = ((0, 32), (256, 4), (320, 16), (448, 1))
    planes = EntryPlanes(*(Plane(offset, size, rows) for offset, size in plane))
    kv, gate = normal(count, group, width), normal(count, group, width, seed=1)
    norm, key, key_norm = (
        normal(width).bfloat16(),
        normal(key_width, width).bfloat16(),
        normal(key_width).bfloat16(),
    )
    positions, freqs = torch.arange(count) * 31, rope_frequencies(16, 10_000.0)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    seq = torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32)
    entry = torch.tensor([0, 9, 3, 15, 7], dtype=torch.int32)
    pooled = compress_ref.pool_groups(kv, gate) if group > 1 else kv[:, 0].bfloat16()
    want = torch.zeros(4, 512, dtype=torch.uint8)
    entries = Entries(*compress_ref.entries(pooled, norm, key, key_norm, positions, freqs, EPS))
    write_entries(want, planes, table, seq, entry, entries)
    got = torch.zeros_like(want)
    source = (kv, gate) if group > 1 else (pooled, None)
    compress_triton.write_entries(
        *source, norm, key, key_norm, rope_table(positions, freqs), EPS, got, planes, table, seq, entry
    )
    assert torch.equal(got, want)
    compress_triton.write_entries(
        *source,
        norm,
        key,
        key_norm,
        rope_table(positions, freqs),
        EPS,
        got,
        planes,
        table + 1000,
        seq + 9,
        entry - 20,
    )


def test_linear_fp8_and_its_activations() -> None:
    from cedar.kernels import linear_triton

    x = normal(5, 96).bfloat16()
    weight = normal(70, 96).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 128, (3, 3), dtype=torch.uint8)
    want = linear_ref.linear_fp8(x, fp8_ref.expand_blocks(weight, scale, torch.float64))
    assert torch.equal(linear_triton.linear_fp8(x, weight, scale), want)
    seen = fp8_ref.round_trip(x)
    assert torch.equal(linear_triton.permuted(x), seen)
    order = [3, 7, 2, 6, 1, 5, 0, 4]
    want = seen.view(5, -1, 8)[..., order].flatten(1)
    assert torch.equal(linear_triton.permuted(x, linear_triton.FOR_FP4), want)


def test_grouped_order_keeps_groups_together() -> None:
    """A thread's eight channels of a group, four a step: pairs 0 and 1 of step 0, then those of step 1."""
    from cedar.kernels import linear_triton

    x = normal(3, 96).bfloat16()
    seen = linear_triton.permuted(x).view(3, 3, 4, 2, 2, 2)  # group, thread, step, pair, half
    want = seen.permute(0, 1, 3, 4, 2, 5).reshape(3, 96)
    assert torch.equal(linear_triton.permuted(x, linear_triton.GROUPED), want)


def test_wide_order_only_moves_channels() -> None:
    from cedar.kernels import linear_triton

    x = normal(2, 256).bfloat16()
    wide = linear_triton.permuted(x, linear_triton.FOR_FP8 + linear_triton.WIDE)
    narrow = linear_triton.permuted(x, linear_triton.FOR_FP8).view(2, 2, 4, 8, 2, 2)
    assert torch.equal(wide.view(2, 2, 8, 2, 4, 2), narrow.permute(0, 1, 3, 4, 2, 5))


@pytest.mark.parametrize("sorted_by_one", [0, 4096])
def test_experts(sorted_by_one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cedar.kernels import experts_triton

    monkeypatch.setattr(experts_triton, "SORTED_BY_ONE", sorted_by_one)
    width, inner, experts, k = 64, 96, 6, 2
    packed = tuple(
        fp4_ref.pack_e8m0((normal(experts, rows, columns, seed=i) * 0.2).bfloat16())
        for i, (rows, columns) in enumerate(((inner, width), (inner, width), (width, inner)))
    )
    x, weights = normal(5, width).bfloat16(), torch.rand(5, k)
    ids = torch.stack([torch.randperm(experts)[:k].sort().values for _ in range(5)]).to(torch.int32)
    want = experts_ref.grouped_experts(x, ids, weights, packed, None, 10.0)
    got = experts_triton.grouped_experts(x, ids, weights, packed, 10.0)
    assert (got - want).norm() <= 1e-3 * want.norm()
    outside = ids.long()
    outside[1, 0], outside[2, 1], outside[4, 1] = -3, 1 << 40, experts  # an expert of the sorter's padding
    taken = experts_triton.grouped_experts(x, outside.clamp(0, experts - 1), weights, packed, 10.0)
    assert torch.equal(experts_triton.grouped_experts(x, outside, weights, packed, 10.0), taken)
    assert torch.equal(taken[[0, 3]], got[[0, 3]])


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "together"), [(700, 384, 6, 80), (430, 40, 3, 16), (5, 7, 2, 8)]
)
def test_slots_by_expert_in_order(
    tokens: int, experts: int, k: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs sort: more slots than a program's, experts with none, one and several tiles."""
    from cedar.kernels import experts_triton

    monkeypatch.setattr(experts_triton, "SORTED_BY_ONE", 0)
    ids = torch.rand(tokens, experts).mul(torch.rand(experts)).topk(k, dim=1).indices.sort(dim=1).values
    (slots, owners, tiles), place = experts_triton._tiles_of(ids, experts, together)
    places, whose = [], []
    for expert in range(experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        count = -(-len(mine) // together)
        places += mine + [-1] * (count * together - len(mine))
        whose += [expert] * count
    assert len(whose) <= tiles
    assert owners.tolist() == whose + [-1] * (tiles - len(whose))
    assert slots.tolist() == places + [-1] * (tiles * together - len(places))
    assert slots[place.long()].tolist() == list(range(tokens * k))


def test_mhc() -> None:
    from cedar.kernels import mhc_triton

    x, y, fn = normal(5, 4, 96).bfloat16(), normal(5, 96).bfloat16(), normal(24, 384) * 0.05
    scale, base = torch.rand(3), normal(24)
    mixes = mhc_ref.mix(x, fn, scale, base, EPS, 1e-6, 20)
    for got, want in zip(mhc_triton.mix(x, fn, scale, base, EPS, 1e-6, 20), mixes, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    pre, post, comb = mixes
    streams = mhc_ref.expand(x, y, post, comb)
    norm = torch.rand(96).bfloat16()
    got, row = mhc_triton.boundary(x, (y, post, comb), pre, (norm, EPS))
    assert torch.equal(got, streams)
    assert row is not None
    assert torch.equal(row, norm_ref.rms_norm(mhc_ref.collapse(streams, pre), norm, EPS))
    got, row, new, quantised = mhc_triton.sublayer(
        x, (y, post, comb), pre, (norm, EPS), (fn, scale, base, EPS, 1e-6, 20), (NATURAL, CODES)
    )
    assert [prepared.order for prepared in quantised] == [NATURAL, CODES]
    assert torch.equal(quantised[0].values, prepared_ref.prepared(row, NATURAL).values)
    assert torch.equal(got, streams)
    assert torch.equal(row, norm_ref.rms_norm(mhc_ref.collapse(streams, pre), norm, EPS))
    for part, want in zip(new, mhc_ref.mix(streams, fn, scale, base, EPS, 1e-6, 20), strict=True):
        assert torch.allclose(part, want, rtol=1e-5, atol=1e-6)
    _, row = mhc_triton.boundary(x, None, pre)
    assert row is not None
    assert torch.equal(row, mhc_ref.collapse(x, pre))


@pytest.mark.parametrize(("tokens", "experts", "width"), [(6, 48, 32), (19, 70, 320)])
def test_the_router_in_one_launch(tokens: int, experts: int, width: int) -> None:
    from cedar.kernels import router_triton

    x, weight = normal(tokens, width).bfloat16(), normal(experts, width).bfloat16()
    bias = torch.stack((normal(experts), normal(experts, seed=1)))[torch.arange(tokens) % 2] * 0.1
    ids, weights = router_ref.route(x, weight, bias, 6, 1.5)
    got_ids, got = router_triton.route(x, weight, bias, 6, 1.5)
    assert torch.equal(got_ids, ids)
    assert torch.allclose(got, weights, rtol=1e-5)
    assert not router_triton.counters(x.device).any()
    logits = (x.double() @ weight.double().T).float()
    got_ids, got = router_triton.choose(logits, bias, 6, 1.5)
    assert torch.equal(got_ids, ids)
    assert torch.allclose(got, weights, rtol=1e-5)


def test_the_router_sends_ties_to_the_lower_id() -> None:
    from cedar.kernels import router_triton

    ids, _ = router_triton.route(
        torch.ones(2, 32).bfloat16(), torch.ones(20, 32).bfloat16(), torch.zeros(20), 3, 1.0
    )
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_norm() -> None:
    from cedar.kernels import norm_triton

    x, weight = normal(6, 32).bfloat16(), normal(48, 32).bfloat16()
    assert torch.equal(norm_triton.rms_norm(x, weight[0], EPS), norm_ref.rms_norm(x, weight[0], EPS))


def test_engram_gate() -> None:
    from cedar.kernels import engram_gate_triton

    x, key, value = normal(5, 4, 96).bfloat16(), normal(5, 4, 96, seed=1).bfloat16(), normal(5, 96).bfloat16()
    q, k = normal(4, 96).bfloat16(), normal(4, 96, seed=1).bfloat16()
    image = torch.tensor([0, 1, 0, 0, 0], dtype=torch.bool)
    want = engram_gate_ref.engram_gate(x, key, value, q, k, image, EPS)
    got = engram_gate_triton.engram_gate(x, key, value, q, k, image, EPS)
    assert (got.double() - want.double()).norm() <= 1e-3 * want.double().norm()
    assert torch.equal(got[1], x[1])


def test_the_router_sorts_its_choices_into_tiles() -> None:
    from cedar.kernels import router_triton

    tokens, experts, k, rows = 21, 12, 3, 8
    x, gate = normal(tokens, 128).bfloat16(), normal(experts, 128).bfloat16()
    want_ids, want = router_ref.route(x, gate, torch.zeros(experts), k, 1.5)
    ids, weights, tiles = router_triton.route_to_tiles(x, gate, torch.zeros(experts), k, 1.5, rows)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want, rtol=1e-5)
    coarse, fine = tiles.bands.view(torch.float8_e4m3fn).to(torch.float32).unbind(1)
    assert not ((coarse != 0) & (fine != 0)).any()
    assert bool((coarse.abs()[coarse != 0] >= 16).all())
    assert bool((fine.abs() < 16).all())
    read_back = (coarse + fine).view(tokens, -1, 2, 16).transpose(2, 3).reshape(tokens, -1, 32)
    read_back = read_back * (tiles.scales / 64).unsqueeze(-1)
    assert torch.equal(read_back.view(tokens, -1), fp8_ref.round_trip(x).to(torch.float32))
    found: dict[int, list[int]] = {}
    for owner, slots in zip(tiles.owners.tolist(), tiles.slots.view(-1, rows).tolist(), strict=True):
        taken = [slot for slot in slots if slot >= 0]
        assert bool(taken) == (owner >= 0)
        found.setdefault(owner, []).extend(taken)
    flat = ids.flatten().tolist()
    for expert in range(experts):
        assert sorted(found.get(expert, [])) == [slot for slot, of in enumerate(flat) if of == expert]
    assert found[experts] == list(range(tokens * k, tokens * k + tokens))
    assert not router_triton.counters(x.device).any()
