"""The differentiable vision tower for images of one size (spec §8)."""

from __future__ import annotations

import torch
from cedar.model.config import VisionConfig
from cedar.model.images import ImagePlan, token_types
from cedar.model.vision import rope_tables
from cedar.training.matrices import Norm, Plain
from torch import Tensor, nn

_EPS = 1e-6


class PatchEmbed(nn.Module):
    """Flattened patches to the tower's width."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.proj = Plain(vision.hidden_size, 3 * vision.patch_size**2, bias=True)


class VisionAttention(nn.Module):
    """Full attention over an image's patches."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        width = vision.hidden_size
        self.heads = vision.heads
        self.wqkv = Plain(3 * width, width, bias=True)
        self.wo = Plain(width, width, 0.5, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """bf16 [K, n, d] to the same."""
        q, k, v = self.wqkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k = _rotate_half(q, cos, sin), _rotate_half(k, cos, sin)
        scores = q.transpose(1, 2).float() @ k.permute(0, 2, 3, 1).float() * q.shape[-1] ** -0.5
        mixed = (scores.softmax(-1) @ v.transpose(1, 2).float()).to(torch.bfloat16)
        result: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return result


class VisionMlp(nn.Module):
    """SwiGLU with fused gate and up."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.w1 = Plain(2 * vision.intermediate_size, vision.hidden_size)
        self.w2 = Plain(vision.hidden_size, vision.intermediate_size, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [K, n, d] to the same."""
        gate, up = self.w1(x).chunk(2, -1)
        result: Tensor = self.w2(torch.nn.functional.silu(gate.float()).to(torch.bfloat16) * up)
        return result


class VisionBlock(nn.Module):
    """One pre-norm block."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(vision.hidden_size, _EPS), Norm(vision.hidden_size, _EPS)
        self.attn, self.mlp = VisionAttention(vision), VisionMlp(vision)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """bf16 [K, n, d] to the same."""
        x = x + self.attn(self.norm1(x), cos, sin)
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class VisionTower(nn.Module):
    """Patches to the tower's features."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.config = vision
        self.patch_embed = PatchEmbed(vision)
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.layers))
        self.norm = Norm(vision.hidden_size, _EPS)

    def forward(self, patches: Tensor, plan: ImagePlan) -> Tensor:
        """bf16 [K, n, 3·P·P] to bf16 [K, R·C, d·s·s], unfolded for the aligner."""
        x = self.patch_embed.proj(patches)
        cos, sin = (t.to(x.device) for t in rope_tables(plan.patch_rows, plan.patch_columns, self.config))
        for block in self.blocks:
            x = block(x, cos, sin)
        side = self.config.downsample_ratio
        x = self.norm(x).unflatten(1, (plan.rows, side, plan.columns, side))
        return x.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)


class Aligner(nn.Module):
    """Unfolded features to the text width."""

    def __init__(self, vision: VisionConfig, d: int) -> None:
        super().__init__()
        self.w1 = Plain(d, vision.hidden_size * vision.downsample_ratio**2, bias=True)
        self.w2 = Plain(d, d, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [..., d·s·s] to bf16 [..., E]."""
        result: Tensor = self.w2(torch.nn.functional.gelu(self.w1(x).float()).to(torch.bfloat16))
        return result


def span_template(plan: ImagePlan) -> Tensor:
    """int64 [span]: START, SLOT, NEWLINE, END kinds."""
    return torch.tensor(token_types(plan.rows, plan.columns))


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(torch.bfloat16)
