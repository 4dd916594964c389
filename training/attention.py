"""Differentiable attention: window keys, selected entries, the compressor and the indexer (spec §3).

Letters: B rows, T tokens, N = B·T, W window, n = T / W blocks, H heads, D head dim, M entries.
"""

from __future__ import annotations

import torch
from cedar.model.config import ModelConfig
from cedar.model.schedule import LayerMode, LayerPlan
from cedar.training.context import Context
from cedar.training.fused import masked_softmax, matmul, rotate, wide
from cedar.training.indexer import Indexer
from cedar.training.matrices import Dense, Norm, Plain
from cedar.training.quantise import fp4_entry, fp8_activation, fp8_weight
from torch import Tensor, nn


class Compressor(nn.Module):
    """Groups of m tokens to latents before RoPE."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = Plain(config.head_dim, config.hidden_size)
        self.wgate = Plain(config.head_dim, config.hidden_size, 0.1) if ratio > 1 else None
        self.norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [B·M, D] of x bf16 [N, d]."""
        if self.wgate is None:
            result: Tensor = self.norm(self.wkv(x))
            return result
        kv = self.wkv.full(x).unflatten(0, (-1, self.ratio))
        gate = self.wgate.full(x).unflatten(0, (-1, self.ratio)).softmax(1)
        latent: Tensor = self.norm((kv * gate).sum(1).to(torch.bfloat16))
        return latent


class Attention(nn.Module):
    """One layer's attention, its parameters named as published."""

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        d, heads, width = config.hidden_size, config.heads, config.head_dim
        self.config, self.plan = config, plan
        self.in_decoder = plan.layer >= config.decoder_start_layer
        self.wq_a = Dense(config.q_lora_rank, d)
        self.q_norm = Norm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Dense(heads * width, config.q_lora_rank)
        self.wkv = Dense(width, d)
        self.kv_norm = Norm(width, config.rms_norm_eps)
        self.wo_a = Dense(config.o_groups * config.o_lora_rank, heads * width // config.o_groups)
        self.wo_b = Dense(d, config.o_groups * config.o_lora_rank, 0.3)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        produces = plan.mode is LayerMode.FULL
        self.compressor = Compressor(config, plan.ratio) if produces else None
        self.indexer = Indexer(config, plan) if plan.selects else None

    def forward(self, x: Tensor, context: Context, entries: Entries) -> Tensor:
        """bf16 [N, d] of normed x bf16 [N, d]."""
        compressed = self.plan.ratio > 0
        cos, sin = context.angles(compressed)
        latent = self.q_norm(self.wq_a(x))
        q = rotate(self.wq_b(latent).unflatten(1, (self.config.heads, -1)), cos, sin)
        key = fp8_activation(rotate(self.kv_norm(self.wkv(x)), cos, sin))
        if self.compressor is not None:
            entries.produce(self.compressor(x), context, self.plan.ratio)
        if self.indexer is not None:
            self.indexer(x, latent, context, entries)
        o = self._attend(q, key, context, entries if compressed else None)
        o = rotate(o, cos, -sin)
        return self.project(o)

    def _attend(self, q: Tensor, key: Tensor, context: Context, entries: Entries | None) -> Tensor:
        rows, width = context.rows, self.config.window
        heads, channels = q.shape[1:]
        scale = channels**-0.5
        q = q.view(rows, -1, width, heads, channels).transpose(2, 3)
        blocks = key.view(rows, -1, width, channels)
        before = torch.nn.functional.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
        near = torch.cat((before, blocks), 2)  # [B, n, 2W, D]
        low = _product(q.flatten(2, 3), near.transpose(2, 3)).unflatten(2, (heads, width))
        mask = context.window_mask(self.in_decoder)
        if entries is None:
            p_low, _ = masked_softmax(low, None, mask, None, self.attn_sink, scale)
            o = _product(p_low.flatten(2, 3), near)
        else:
            far = entries.values
            high = _product(q.flatten(1, 3), far.transpose(1, 2)).view(*q.shape[:4], -1)
            chosen = entries.mask.view(rows, -1, width, far.shape[1])
            p_low, p_high = masked_softmax(low, high, mask, chosen, self.attn_sink, scale)
            assert p_high is not None
            o = _product(p_low.flatten(2, 3), near)
            o = o + _product(p_high.flatten(1, 3), far).view(o.shape)
            entries.teach(p_high, context)
        o = o.unflatten(2, (heads, width)).transpose(2, 3).reshape(-1, heads, channels)
        return o.to(torch.bfloat16)

    def project(self, o: Tensor) -> Tensor:
        """Grouped `wo_a`, then `wo_b`."""
        groups = self.config.o_groups
        weight = fp8_weight(self.wo_a.weight).unflatten(0, (groups, -1))
        parts = o.flatten(1).unflatten(1, (groups, -1)).unbind(1)
        joined = [matmul(part, w) for part, w in zip(parts, weight.unbind(0), strict=True)]
        result: Tensor = self.wo_b(torch.cat(joined, 1))
        return result


class Entries:
    """Global entries of the nearest source below, their selection, and who learns from reading them."""

    def __init__(self) -> None:
        self.latent: Tensor
        self.values: Tensor  # bf16 [B, M, D]
        self.keys: Tensor  # bf16 [B, M, Di]
        self.ratio = 0
        self.mask: Tensor  # bool [B, T, M]

    def produce(self, latent: Tensor, context: Context, ratio: int) -> None:
        """From latents bf16 [B·M, D]."""
        cos, sin = context.angles(True, ratio)
        self.latent, self.ratio = latent, ratio
        values = rotate(latent, cos, sin)
        values = (fp4_entry(values) if context.packed else values).view(context.rows, -1, latent.shape[1])
        if context.loaded is not None:
            values = context.loaded.over(values, len(context.written), 0, ratio)
        self.values = values

    def teach(self, p: Tensor, context: Context) -> None:
        """Note attention [B, n, H, W, M] at the sampled queries for the sources that selected."""
        taught = context.selections.taught
        if not taught or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            queries = context.batch.queries
            width = p.shape[3]
            rows = torch.arange(p.shape[0], device=p.device).unsqueeze(1)
            mass = p[rows, queries // width, :, queries % width].float().mean(2)
        for place in context.selections.learners:
            taught[place][1].append(mass)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batched product; what the reference keeps wide stays wide on the CPU."""
    return a @ b if a.is_cuda else wide(a) @ wide(b)
