"""Differentiable layers around the mHC streams: mix, experts, Engram (spec §3, §6, §7).

Letters: N = B·T tokens, hc streams, d hidden, E experts, I expert width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cedar.model.config import EngramConfig, ModelConfig
from cedar.model.engram_ids import EngramHashPlan
from cedar.model.schedule import LayerPlan
from cedar.training.attention import Attention, Entries
from cedar.training.context import Context
from cedar.training.fused import (
    collapse_norm,
    engram_gate,
    expand,
    gates,
    matmul,
    matmul_fp32,
    mix,
    swiglu,
    swiglu_weighted,
)
from cedar.training.matrices import Dense, Norm
from cedar.training.quantise import fp8_activation, fp8_weight, mxfp4_weight
from cedar.training.sinkhorn import sinkhorn
from torch import Tensor, nn


class Gate(nn.Module):
    """The router's matrix and its two selection biases, moved by load and not by gradient."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * (0.3 * width**-0.5))
        self.bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(experts), requires_grad=False)
        # fp32 [2, E]: choices of text and image tokens in the last forward; written in place, so that a
        # recorded update reads what any recorded forward wrote
        self.load: Tensor
        self.register_buffer("load", torch.zeros(2, experts), persistent=False)

    def forward(self, x: Tensor, is_image: Tensor, k: int, scale: float) -> Tensor:
        """fp32 [N, E]: every token's weights, 0 for experts that it did not choose."""
        s = torch.nn.functional.softplus(matmul_fp32(x, self.weight.to(torch.bfloat16))).sqrt()
        bias = torch.where(is_image.unsqueeze(1), self.bias_vl, self.bias)
        chosen = torch.zeros_like(s).scatter_(1, (s.detach() + bias).topk(k, 1).indices, 1.0)
        if torch.is_grad_enabled():
            image = is_image.float()
            self.load.copy_(torch.stack(((1 - image) @ chosen, image @ chosen)))
        kept = s * chosen
        return kept / (kept.sum(1, keepdim=True) + 1e-20) * scale

    @torch.no_grad()
    def balance(self, rate: float | Tensor) -> None:
        """Move each bias toward equal load."""
        for bias, load in zip((self.bias, self.bias_vl), self.load, strict=True):
            bias.add_(rate * torch.sign(load.mean() - load))
            bias.sub_(bias.mean())


class RoutedExperts(nn.Module):
    """MXFP4 experts, stacked: w1, w3 [E, I, d], w2 [E, d, I]. All run on all tokens."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, inner, width) * width**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, inner, width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, inner) * (0.5 * inner**-0.5))

    def forward(self, x: Tensor, weights: Tensor, limit: float) -> Tensor:
        """fp32 [N, d] of x bf16 [N, d] that is quantised already."""
        count = self.w1.shape[0]
        gate = matmul(x, mxfp4_weight(self.w1).flatten(0, 1)).unflatten(1, (count, -1))
        up = matmul(x, mxfp4_weight(self.w3).flatten(0, 1)).unflatten(1, (count, -1))
        hidden = fp8_activation(swiglu_weighted(gate, up, weights, limit))
        w2 = mxfp4_weight(self.w2)
        if x.is_cuda:
            return matmul(hidden.flatten(1), w2.transpose(0, 1).flatten(1)).float()
        parts = [matmul(hidden[:, e], w2[e]).float() for e in range(count)]
        return torch.stack(parts).sum(0)


class SharedExpert(nn.Module):
    """The expert that every token runs."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = Dense(inner, width), Dense(inner, width), Dense(width, inner, 0.5)

    def forward(self, x: Tensor, limit: float) -> Tensor:
        """bf16 [N, d] of x that is quantised already."""
        gate, up = (matmul(x, fp8_weight(m.weight)) for m in (self.w1, self.w3))
        result: Tensor = self.w2(swiglu(gate, up, limit))
        return result


class MixtureOfExperts(nn.Module):
    """Router, routed experts, shared expert."""

    def __init__(self, config: ModelConfig, experts: int, per_token: int) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.moe_intermediate_size
        self.config, self.per_token = config, per_token
        self.gate = Gate(experts, d)
        self.experts = RoutedExperts(experts, d, inner)
        self.shared_experts = SharedExpert(d, inner)

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        """bf16 [N, d] of normed x bf16 [N, d]."""
        weights = self.gate(x, is_image, self.per_token, self.config.routed_scaling_factor)
        x = fp8_activation(x)
        routed = self.experts(x, weights, self.config.swiglu_limit)
        total: Tensor = routed + self.shared_experts(x, self.config.swiglu_limit)
        return total.to(torch.bfloat16)


class Table(nn.Module):
    """An Engram table's rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))


class Engram(nn.Module):
    """Hashed n-grams of one layer (spec §7)."""

    def __init__(self, config: ModelConfig, engram: EngramConfig, rows: int) -> None:
        super().__init__()
        hc, d = config.hc_mult, config.hidden_size
        self.embed = Table(rows, engram.head_dim)
        self.wkv = Dense((hc + 1) * d, engram.columns * engram.head_dim)
        self.q_weight = nn.Parameter(torch.ones(hc, d))
        self.k_weight = nn.Parameter(torch.ones(hc, d))
        self.eps = config.rms_norm_eps

    def forward(self, streams: Tensor, rows: Tensor, is_image: Tensor) -> Tensor:
        """Streams bf16 [N, hc, d] plus the gated value; rows int64 [N, C]."""
        hc, d = streams.shape[1:]
        memory = fp8_activation(torch.nn.functional.embedding(rows, self.embed.weight).to(torch.bfloat16))
        projected = self.wkv(memory.flatten(1))
        key, value = projected[:, : hc * d].unflatten(1, (hc, d)), projected[:, hc * d :]
        weight = self.q_weight.to(torch.bfloat16).float() * self.k_weight.to(torch.bfloat16).float()
        keep = (~is_image).float()
        result: Tensor = engram_gate(streams, key, value, weight, keep, self.eps)
        return result


def engram_rows(plan: EngramHashPlan, tokens: Tensor) -> Tensor:
    """int64 [N, C] of compressed windows int64 [N, G]."""
    multipliers, primes, offsets = _hash_constants(plan.multipliers, plan.primes, plan.offsets, tokens.device)
    products = tokens * multipliers
    mixed, columns = products[:, 0], []
    for n in range(1, products.shape[1]):
        mixed = mixed ^ products[:, n]
        columns.append(mixed.unsqueeze(1) % primes[n - 1])
    return torch.cat(columns, 1) + offsets


@cache
def _hash_constants(*values: Any) -> tuple[Tensor, ...]:
    """The values but the last as tensors on the device that the last is, made once."""
    return tuple(torch.tensor(value, device=values[-1]) for value in values[:-1])


class Layer(nn.Module):
    """One backbone layer, its parameters named as published."""

    def __init__(
        self, config: ModelConfig, plan: LayerPlan, experts: int | None = None, per_token: int | None = None
    ) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        hc, d = config.hc_mult, config.hidden_size
        self.attn_norm = Norm(d, config.rms_norm_eps)
        self.ffn_norm = Norm(d, config.rms_norm_eps)
        for name, place in (("hc_attn", 2 * plan.layer), ("hc_ffn", 2 * plan.layer + 1)):
            self.register_parameter(f"{name}_fn", nn.Parameter(torch.randn(config.hc_rows, hc * d) * 0.02))
            self.register_parameter(f"{name}_base", nn.Parameter(_first_base(hc, (place + 1) % hc)))
            self.register_parameter(f"{name}_scale", nn.Parameter(torch.full((3,), 0.3)))
        self.attn = Attention(config, plan)
        self.ffn = MixtureOfExperts(
            config, experts or config.routed_experts, per_token or config.experts_per_token
        )
        self.engram: Engram | None = None
        if config.engram is not None and plan.has_engram:
            place = config.engram.layer_ids.index(plan.layer)
            self.engram = Engram(config, config.engram, config.engram.num_embeddings[place])

    def forward(
        self, streams: Tensor, pre: Tensor, context: Context, entries: Entries, hashed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Streams bf16 [N, hc, d] and pre fp32 [N, hc] after the layer."""
        eps = self.config.rms_norm_eps
        is_image = context.batch.is_image.flatten()
        if self.engram is not None and hashed is not None:
            streams = self.engram(streams, hashed, is_image)
        pre_attn, post, comb = self.mix("hc_attn", streams)
        x = collapse_norm(streams, pre, self.attn_norm.weight, eps)
        streams = expand(streams, self.attn(x, context, entries), post, comb)
        pre_ffn, post, comb = self.mix("hc_ffn", streams)
        x = collapse_norm(streams, pre_attn, self.ffn_norm.weight, eps)
        return expand(streams, self.ffn(x, is_image), post, comb), pre_ffn

    def mix(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post fp32 [N, hc] and comb fp32 [N, hc, hc]."""
        config = self.config
        fn, base, scale = (getattr(self, f"{name}_{part}") for part in ("fn", "base", "scale"))
        z = mix(streams, fn, config.rms_norm_eps)
        pre, post, comb = gates(z, scale, base, config.hc_mult, config.hc_eps)
        return pre, post, sinkhorn(comb, config.hc_eps, config.hc_sinkhorn_iters)


def _first_base(hc: int, favoured: int) -> Tensor:
    """Reads mostly one stream, writes to all, keeps streams apart."""
    pre = torch.full((hc,), -1.0)
    pre[favoured] = 1.0
    return torch.cat((pre, torch.zeros(hc), (4 * torch.eye(hc)).flatten()))
