"""The compressor of a KV source: m tokens become one packed entry and one packed index key (spec §3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import compress_ref, fp4_ref, paging_ref
from cedar.kernels.contract import Contract
from cedar.kernels.linear import FLOATS
from cedar.kernels.paging import INDEX_TYPES, Plane, check_plane


class Entries(NamedTuple):
    """Packed uint8 rows of G groups: payloads [G, D/2], [G, Di/2]; scales [G, D/16] E4M3, [G, Di/32] E8M0."""

    main_payload: torch.Tensor
    main_scales: torch.Tensor
    index_payload: torch.Tensor
    index_scales: torch.Tensor


class EntryPlanes(NamedTuple):
    """Where a KV source's four kinds of rows lie in every page; all four have as many rows a page."""

    main_payload: Plane
    main_scales: Plane
    index_payload: Plane
    index_scales: Plane


def pool_groups(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Pools complete groups to bf16 [G, D]: kv weighted by the softmax of gate over the group, per channel.

    kv, gate fp32 [G, m, D], tokens of a group in order. The result is the latent before its norm.
    """
    c = Contract("pool_groups")
    c.expect("kv", kv, "G m D", torch.float32)
    c.expect("gate", gate, "G m D", torch.float32)
    return compress_ref.pool_groups(kv, gate)


def compress_entries(
    pooled: torch.Tensor,
    norm_weight: torch.Tensor,
    key_weight: torch.Tensor,
    key_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> Entries:
    """Packs latents: pooled bf16 [G, D] (pool_groups' result; at m = 1 the output of wkv) to `Entries`.

    norm_weight bf16 [D] (compressor.norm); key_weight [Di, D] (indexer.wk, bf16 or wider); key_norm_weight
    bf16 [Di] (indexer.k_norm); positions int64 [G], the first token of each group; freqs fp32 [R/2] of the
    layer. The index key comes from the normed latent before RoPE and before packing.
    """
    c = Contract("compress_entries")
    c.expect("pooled", pooled, "G D", torch.bfloat16)
    c.expect("norm_weight", norm_weight, "D", torch.bfloat16)
    c.expect("key_weight", key_weight, "Di D", *FLOATS)
    c.expect("key_norm_weight", key_norm_weight, "Di", torch.bfloat16)
    c.expect("positions", positions, "G", torch.int64)
    c.expect("freqs", freqs, "F", torch.float32)
    c.divisible("pooled", "D", fp4_ref.E4M3_GROUP)
    c.divisible("key_weight", "Di", fp4_ref.E8M0_GROUP)
    c.require(
        "freqs", 2 * freqs.shape[0] <= min(c.dims["D"], c.dims["Di"]), "turns more channels than there are"
    )
    return Entries(
        *compress_ref.entries(pooled, norm_weight, key_weight, key_norm_weight, positions, freqs, eps)
    )


def write_entries(
    pages: torch.Tensor,
    planes: EntryPlanes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
    entries: Entries,
) -> None:
    """Writes packed entries into their pages, in place: entries[g] becomes entry entry[g] of sequence seq[g].

    pages uint8 [P, page_bytes], page_table int [S, maxp], seq and entry int [G]; a negative entry is not
    written. Errors as `scatter_rows`.
    """
    c = Contract("write_entries")
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.expect("seq", seq, "G", *INDEX_TYPES)
    c.expect("entry", entry, "G", *INDEX_TYPES)
    for name, plane, rows in zip(EntryPlanes._fields, planes, entries, strict=True):
        c.expect(f"entries.{name}", rows, f"G {plane.row_bytes}", torch.uint8)
        check_plane(c, f"planes.{name}", plane, rows=planes.main_payload.rows)
    if bool((entry < 0).any()):
        kept = torch.nonzero(entry >= 0).squeeze(1)
        seq, entry, entries = seq[kept], entry[kept], Entries(*(rows[kept] for rows in entries))
    paging_ref.scatter(pages, planes, page_table, seq, entry, entries)


def compress_into_pages(
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor,
    key_weight: torch.Tensor,
    key_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
    pages: torch.Tensor,
    planes: EntryPlanes,
    page_table: torch.Tensor,
    seq: torch.Tensor,
    entry: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`pool_groups`, `compress_entries` and `write_entries`, one launch on a GPU.

    kv and gate fp32 [G, m, D]; or gate None and kv the pooled bf16 [G, D]. The rest as in those three.
    `rope`,
    `rope_table` of positions and freqs, spares a GPU the making of it.
    """
    fits = (
        kv.shape[-1].bit_count() == 1 and key_weight.shape[0].bit_count() == 1 and key_weight.shape[0] >= 32
    )
    if kv.is_cuda and fits:
        from cedar.kernels import compress_triton
        from cedar.kernels.rope import rope_table

        c = Contract("compress_into_pages")
        c.expect(
            "kv", kv, "G D" if gate is None else "G m D", torch.bfloat16 if gate is None else torch.float32
        )
        if gate is not None:
            c.expect("gate", gate, "G m D", torch.float32)
        c.expect("norm_weight", norm_weight, "D", torch.bfloat16)
        c.expect("key_weight", key_weight, "Di D", *FLOATS)
        c.expect("key_norm_weight", key_norm_weight, "Di", torch.bfloat16)
        c.expect("pages", pages, "P B", torch.uint8)
        c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
        c.expect("seq", seq, "G", *INDEX_TYPES)
        c.expect("entry", entry, "G", *INDEX_TYPES)
        sizes = (c.dims["D"] // 2, c.dims["D"] // 16, c.dims["Di"] // 2, c.dims["Di"] // 32)
        for name, plane, size in zip(EntryPlanes._fields, planes, sizes, strict=True):
            check_plane(c, f"planes.{name}", plane, row_bytes=size, rows=planes.main_payload.rows)
        rope = rope_table(positions, freqs) if rope is None else rope
        compress_triton.write_entries(
            kv,
            gate,
            norm_weight,
            key_weight,
            key_norm_weight,
            rope,
            eps,
            pages,
            planes,
            page_table,
            seq,
            entry,
        )
        return
    pooled = kv if gate is None else pool_groups(kv, gate)
    entries = compress_entries(pooled, norm_weight, key_weight, key_norm_weight, positions, freqs, eps)
    write_entries(pages, planes, page_table, seq, entry, entries)
