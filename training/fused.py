"""Elementwise pieces of the differentiable network.

On the CPU, where no gradient is wanted, they run in the widths of the reference (float64 norms and products),
so that the network's values there are the served network's. On an accelerator the pieces that would cost most
as separate operations are kernels of their own. Letters: N rows, hc streams, d hidden, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float64 on the CPU where no gradient is wanted, else float32."""
    return x.float() if x.is_cuda or torch.is_grad_enabled() else x.double()


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 [..., O] of x bf16 [..., I] and weight bf16 [O, I]; as `wide` inside on the CPU."""
    if x.is_cuda:
        return torch.nn.functional.linear(x, weight)
    return (wide(x) @ wide(weight).T).to(x.dtype)


def matmul_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [..., O] of x bf16 [..., I] and weight [O, I] of any width."""
    return (wide(x) @ wide(weight).T).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16 [..., C] times weight [C]."""
    if x.is_cuda:
        return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    inner = wide(x)
    scale = torch.rsqrt(inner.square().mean(-1, keepdim=True) + eps)
    return (inner * scale * weight.to(torch.bfloat16)).to(x.dtype)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """bf16 [N, d]: streams bf16 [N, hc, d] weighted by pre fp32 [N, hc]."""
    if x.is_cuda:
        from cedar.training.streams_triton import Collapse

        result: Tensor = Collapse.apply(x, pre)
        return result
    parts = x.float() * pre.unsqueeze(-1)
    total = parts[:, 0]
    for stream in range(1, x.shape[1]):
        total = total + parts[:, stream]
    return total.to(x.dtype)


def collapse_norm(x: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A sublayer's input."""
    return rms_norm(collapse(x, pre), weight, eps)


def expand(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """bf16 [N, hc, d]: comb-mixed streams plus post times the sublayer's output y bf16 [N, d]."""
    if x.is_cuda:
        from cedar.training.streams_triton import Expand

        result: Tensor = Expand.apply(x, y, post, comb)
        return result
    total = comb[:, 0, :, None] * x[:, 0, None, :].float()
    for stream in range(1, x.shape[1]):
        total = total + comb[:, stream, :, None] * x[:, stream, None, :].float()
    return (total + post.unsqueeze(-1) * y.float().unsqueeze(1)).to(x.dtype)


def mix(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fp32 [N, J]: fn fp32 [J, hc·d] times the flattened streams x bf16 [N, hc, d] over their RMS."""
    if x.is_cuda:
        from cedar.training.mix_triton import Mix

        result: Tensor = Mix.apply(x, fn, eps)
        return result
    flat = wide(x).flatten(1)
    rms = torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)
    return ((flat @ fn.to(flat.dtype).T) * rms).float()


def gates(z: Tensor, scale: Tensor, base: Tensor, hc: int, hc_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post fp32 [N, hc] and the mixing logits [N, hc, hc] of z fp32 [N, (2+hc)·hc]."""
    pre = torch.sigmoid(z[:, :hc] * scale[0] + base[:hc]) + hc_eps
    post = torch.sigmoid(z[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc]) * 2
    comb = (z[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(1, (hc, hc))
    return pre, post, comb


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x bf16 [N, ..., C]: the last 2·R' channels turned as interleaved pairs; cos, sin fp32 [N, R']."""
    if x.is_cuda:
        from cedar.training.attention_triton import Rotate

        result: Tensor = Rotate.apply(x, cos, sin)
        return result
    turning = cos.shape[-1]
    shape = (x.shape[0], *([1] * (x.dim() - 2)), turning)
    cos, sin = cos.view(shape), sin.view(shape)
    pairs = x[..., -2 * turning :].float().unflatten(-1, (turning, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., : -2 * turning], turned), -1)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """bf16 of the same shape."""
    if gate.is_cuda:
        return torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    inner = wide(gate).clamp_max(limit)
    return ((inner * torch.sigmoid(inner)).float() * up.float().clamp(-limit, limit)).to(gate.dtype)


def swiglu_weighted(gate: Tensor, up: Tensor, weight: Tensor, limit: float) -> Tensor:
    """gate, up bf16 [N, E, I], weight fp32 [N, E]."""
    if gate.is_cuda:
        from cedar.training.swiglu_triton import WeightedSwiglu

        result: Tensor = WeightedSwiglu.apply(gate, up, weight, limit)
        return result
    inner = wide(gate).clamp_max(limit)
    silu = (inner * torch.sigmoid(inner)).float()
    return (silu * up.float().clamp(-limit, limit) * weight.unsqueeze(-1)).to(gate.dtype)


def engram_gate(x: Tensor, key: Tensor, value: Tensor, qk_weight: Tensor, keep: Tensor, eps: float) -> Tensor:
    """x, key bf16 [N, hc, d], value bf16 [N, d], qk_weight [hc, d], keep [N]: 0 at image positions."""
    inner, k = wide(x), wide(key)
    a = (inner * wide(qk_weight) * k).sum(-1) * x.shape[-1] ** -0.5
    a = a * torch.rsqrt(inner.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    gate = torch.sigmoid(torch.sign(a) * torch.sqrt(a.abs().clamp_min(1e-6))) * keep.unsqueeze(-1)
    return (inner + gate.unsqueeze(-1) * wide(value).unsqueeze(1)).to(x.dtype)


def masked_softmax(
    window: Tensor,
    chosen: Tensor | None,
    window_mask: Tensor,
    chosen_mask: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Probabilities of window scores [B, n, H, W, 2W] and global scores [B, n, H, W, M] times `scale`.

    Masks [B, n, W, .] are True where readable; the sink fp32 [H] only adds to the denominator.
    """
    if window.is_cuda:
        from cedar.training.attention_triton import MaskedSoftmax

        together: tuple[Tensor, Tensor | None] = MaskedSoftmax.apply(
            window, chosen, window_mask, chosen_mask, sink, scale
        )
        return together
    low = (wide(window) * scale).masked_fill(~window_mask.unsqueeze(2), -torch.inf)
    sinks = wide(sink).view(1, 1, -1, 1)
    top = torch.maximum(low.amax(-1), sinks)
    high = None
    if chosen is not None and chosen_mask is not None:
        high = (wide(chosen) * scale).masked_fill(~chosen_mask.unsqueeze(2), -torch.inf)
        top = torch.maximum(top, high.amax(-1))
    top = top.detach()
    low = torch.exp(low - top.unsqueeze(-1))
    total = low.sum(-1) + torch.exp(sinks - top)
    if high is None:
        return (low / total.unsqueeze(-1)).to(window.dtype), None
    high = torch.exp(high - top.unsqueeze(-1))
    total = (total + high.sum(-1)).unsqueeze(-1)
    return (low / total).to(window.dtype), (high / total).to(window.dtype)
