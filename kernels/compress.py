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

    pages uint8 [P, page_bytes], page_table int [S, maxp], seq and entry int [G]; errors as `scatter_rows`.
    """
    c = Contract("write_entries")
    c.expect("pages", pages, "P B", torch.uint8)
    c.expect("page_table", page_table, "S maxp", *INDEX_TYPES)
    c.expect("seq", seq, "G", *INDEX_TYPES)
    c.expect("entry", entry, "G", *INDEX_TYPES)
    for name, plane, rows in zip(EntryPlanes._fields, planes, entries, strict=True):
        c.expect(f"entries.{name}", rows, f"G {plane.row_bytes}", torch.uint8)
        check_plane(c, f"planes.{name}", plane, rows=planes.main_payload.rows)
    paging_ref.scatter(pages, planes, page_table, seq, entry, entries)
