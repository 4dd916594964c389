"""One layer of the golden checkpoint, built from the public kernels alone."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch
from cedar.kernels.compress import Entries, EntryPlanes, compress_entries, pool_groups, write_entries
from cedar.kernels.engram_gate import engram_gate
from cedar.kernels.experts import grouped_experts, swiglu
from cedar.kernels.fp4 import pack_fp4_e8m0
from cedar.kernels.fp8 import dequantize_fp8, expand_fp8_blocks, pack_window_rows
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.index_scores import index_scores, index_scores_gathered
from cedar.kernels.linear import linear_dense, linear_fp8
from cedar.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix
from cedar.kernels.norm import rms_norm
from cedar.kernels.paging import Plane
from cedar.kernels.rope import YarnParams, apply_rope, rope_frequencies
from cedar.kernels.router import route
from cedar.kernels.select import block_positions, candidate_blocks, take_candidates, top_k
from cedar.kernels.sparse_attention import sparse_attention
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v41-tiny"
PAGE_TOKENS = 32


@functools.cache
def config() -> dict:
    return json.loads((GOLDEN / "config.json").read_text())["text_config"]


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    tensors = load_file(GOLDEN / "model-00001-of-00001.safetensors")
    return {
        name: t.view(torch.uint8) if t.dtype in (torch.int8, torch.float8_e8m0fnu) else t
        for name, t in tensors.items()
    }


@functools.cache
def expected() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


class Memory(NamedTuple):
    """Pages of one KV source for one sequence, in a shuffled order, and the planes in them."""

    pages: torch.Tensor
    planes: EntryPlanes
    table: torch.Tensor


class Selection(NamedTuple):
    entries: torch.Tensor
    pool: torch.Tensor | None


class LayerOutput(NamedTuple):
    stream: torch.Tensor
    pre: torch.Tensor
    attn_out: torch.Tensor
    ffn_out: torch.Tensor
    window: torch.Tensor  # packed rows of every token
    entries: Entries | None
    selection: Selection | None
    memory: Memory | None


def planes(ratio: int) -> tuple[EntryPlanes, int]:
    """Planes of one source's page and its bytes."""
    c, rows, offset, made = config(), PAGE_TOKENS // ratio, 0, []
    for row_bytes in (
        c["head_dim"] // 2,
        c["head_dim"] // 16,
        c["index_head_dim"] // 2,
        c["index_head_dim"] // 32,
    ):
        made.append(Plane(offset, row_bytes, rows))
        offset = -(-(offset + row_bytes * rows) // 16) * 16
    return EntryPlanes(*made), offset


def new_memory(ratio: int, tokens: int) -> Memory:
    each, page_bytes = planes(ratio)
    needed = -(-tokens // PAGE_TOKENS)
    table = torch.full((2, needed + 1), -1, dtype=torch.int32)
    table[1, :needed] = torch.randperm(needed + 3, generator=torch.Generator().manual_seed(ratio))[:needed]
    return Memory(torch.full((needed + 3, page_bytes), 0xAB, dtype=torch.uint8), each, table)


def frequencies(ratio: int) -> torch.Tensor:
    c = config()
    if ratio == 0:
        return rope_frequencies(c["qk_rope_head_dim"], c["rope_theta"])
    s = c["rope_scaling"]
    yarn = YarnParams(s["factor"], s["beta_fast"], s["beta_slow"], s["original_max_position_embeddings"])
    return rope_frequencies(c["qk_rope_head_dim"], c["compress_rope_theta"], yarn)


def fp8(x: torch.Tensor, name: str) -> torch.Tensor:
    w = weights()
    return linear_fp8(x, w[f"{name}.weight"], w[f"{name}.scale"])


def window_rows(tokens: int) -> torch.Tensor:
    """int32 [T, W]: the rows readable by each token."""
    rows = torch.arange(tokens).unsqueeze(1) - torch.arange(config()["sliding_window"]).flip(0)
    return rows.clamp_min(-1).to(torch.int32)


def compress(x: torch.Tensor, layer: int, ratio: int, freqs: torch.Tensor) -> Entries:
    w, p = weights(), f"layers.{layer}.attn."
    if ratio == 1:
        pooled = linear_dense(x, w[p + "compressor.wkv.weight"])
    else:
        whole = x[: x.shape[0] // ratio * ratio]
        kv = linear_dense(whole, w[p + "compressor.wkv.weight"], torch.float32)
        gate = linear_dense(whole, w[p + "compressor.wgate.weight"], torch.float32)
        pooled = pool_groups(kv.view(-1, ratio, kv.shape[1]), gate.view(-1, ratio, gate.shape[1]))
    return compress_entries(
        pooled,
        w[p + "compressor.norm.weight"],
        w[p + "indexer.wk.weight"],
        w[p + "indexer.k_norm.weight"],
        torch.arange(pooled.shape[0]) * ratio,
        freqs,
        config()["rms_norm_eps"],
    )


def select(
    x: torch.Tensor,
    q_latent: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    ratio: int,
    freqs: torch.Tensor,
    memory: Memory,
    pool: torch.Tensor | None,
) -> Selection:
    c, w, p = config(), weights(), f"layers.{layer}.attn.indexer."
    heads, width = c["index_n_heads"], c["index_head_dim"]
    q = apply_rope(fp8(q_latent, p + "wq_b").view(-1, heads, width), positions, freqs)
    head_weights = linear_dense(x, w[p + "weights_proj.weight"]).float() * width**-0.5 * heads**-0.5
    seq = torch.ones(x.shape[0], dtype=torch.int32)
    visible = ((positions + 1) // ratio).to(torch.int32)
    where = (memory.pages, memory.planes.index_payload, memory.planes.index_scales, memory.table, seq)
    block = c["candidate_block_size"]
    if layer <= c["candidate_source_layer_id"]:
        scores = index_scores(*pack_fp4_e8m0(q), head_weights, *where, visible)
        if layer == c["candidate_source_layer_id"]:
            pool = block_positions(
                candidate_blocks(scores, visible, block, c["candidate_topk_blocks"]), block, visible
            )
        return Selection(top_k(scores, c["index_topk"]), pool)
    scores = index_scores_gathered(*pack_fp4_e8m0(q), head_weights, *where, pool)
    return Selection(take_candidates(pool, top_k(scores, c["index_topk"])), pool)


def moe(x: torch.Tensor, layer: int, is_image: torch.Tensor) -> torch.Tensor:
    c, w, p = config(), weights(), f"layers.{layer}.ffn."
    bias = torch.where(is_image.unsqueeze(1), w[p + "gate.bias_vl"], w[p + "gate.bias"])
    ids, route_weights = route(
        x, w[p + "gate.weight"], bias, c["num_experts_per_tok"], c["routed_scaling_factor"]
    )
    stacked = [
        torch.stack([w[f"{p}experts.{e}.{name}.{kind}"] for e in range(c["n_routed_experts"])])
        for name in ("w1", "w3", "w2")
        for kind in ("weight", "scale")
    ]
    routed = grouped_experts(x, ids, route_weights, *stacked, c["swiglu_limit"])
    shared = p + "shared_experts."
    hidden = swiglu(fp8(x, shared + "w1"), fp8(x, shared + "w3"), c["swiglu_limit"])
    return (routed + fp8(hidden, shared + "w2").float()).to(torch.bfloat16)


def engram(stream: torch.Tensor, layer: int, rows: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
    c, w, p = config(), weights(), f"layers.{layer}.engram."
    found = dequantize_fp8(w[p + "embed.weight"][rows], w[p + "embed.scale"][rows]).flatten(1)
    wide = fp8(found, p + "wkv").view(found.shape[0], c["hc_mult"] + 1, c["hidden_size"])
    return engram_gate(
        stream,
        wide[:, :-1].contiguous(),
        wide[:, -1].contiguous(),
        w[p + "q_weight"],
        w[p + "k_weight"],
        is_image,
        c["rms_norm_eps"],
    )


def run_layer(
    layer: int,
    stream: torch.Tensor,
    pre: torch.Tensor,
    is_image: torch.Tensor,
    engram_rows: torch.Tensor | None,
    memory: Memory | None,
    selection: Selection | None,
) -> LayerOutput:
    c, w, p = config(), weights(), f"layers.{layer}."
    ratio, eps, tokens = c["compress_ratios"][layer], c["rms_norm_eps"], stream.shape[0]
    positions, freqs = torch.arange(tokens), frequencies(ratio)
    if engram_rows is not None:
        stream = engram(stream, layer, engram_rows, is_image)

    def mix(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = (w[f"{p}hc_{kind}_{part}"] for part in ("fn", "scale", "base"))
        return mhc_mix(x, *parts, eps, c["hc_eps"], c["hc_sinkhorn_iters"])

    pre_a, post, comb = mix(stream, "attn")
    x = rms_norm(mhc_collapse(stream, pre), w[p + "attn_norm.weight"], eps)
    q_latent = rms_norm(fp8(x, p + "attn.wq_a"), w[p + "attn.q_norm.weight"], eps)
    q = apply_rope(fp8(q_latent, p + "attn.wq_b").view(tokens, -1, c["head_dim"]), positions, freqs)
    k = rms_norm(fp8(x, p + "attn.wkv"), w[p + "attn.kv_norm.weight"], eps)
    window = pack_window_rows(apply_rope(k, positions, freqs))
    entries = None
    seq = torch.ones(tokens, dtype=torch.int32)
    if layer in c["kv_source_layer_ids"]:
        entries = compress(x, layer, ratio, freqs)
        memory = new_memory(ratio, tokens)
        made = entries.main_payload.shape[0]
        write_entries(memory.pages, memory.planes, memory.table, seq[:made], torch.arange(made), entries)
    if layer in c["index_source_layer_ids"]:
        pool = selection.pool if selection is not None else None
        selection = select(x, q_latent, positions, layer, ratio, freqs, memory, pool)
    if ratio:
        where = (
            memory.pages,
            memory.planes.main_payload,
            memory.planes.main_scales,
            memory.table,
            seq,
            selection.entries,
        )
    else:
        where = (None,) * 6
    o = sparse_attention(q, *where, window, window_rows(tokens), w[p + "attn.attn_sink"])
    o = apply_rope(o, positions, freqs, inverse=True).view(tokens, c["o_groups"], -1)
    wo_a = expand_fp8_blocks(w[p + "attn.wo_a.weight"], w[p + "attn.wo_a.scale"])
    attn_out = fp8(grouped_output(o, wo_a.view(c["o_groups"], c["o_lora_rank"], -1)), p + "attn.wo_b")
    stream = mhc_expand(stream, attn_out, post, comb)
    pre_f, post, comb = mix(stream, "ffn")
    ffn_out = moe(rms_norm(mhc_collapse(stream, pre_a), w[p + "ffn_norm.weight"], eps), layer, is_image)
    stream = mhc_expand(stream, ffn_out, post, comb)
    return LayerOutput(stream, pre_f, attn_out, ffn_out, window, entries, selection, memory)
