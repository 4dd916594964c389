"""The differentiable vision tower, for images of several sizes at once (spec §8).

Letters: K images, S token cells of the largest, s patches a side of a cell, n = S·s·s patches, P patch side,
d tower width, E text width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from cedar.model.config import VisionConfig
from cedar.model.images import ImagePlan
from cedar.training.matrices import Norm, Plain
from torch import Tensor, nn

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """Images padded to one number of cells; patches stand cell by cell, each in reading order."""

    patches: Tensor  # bf16 [K, n, 3·P·P]
    places: Tensor  # int64 [K, n, 2]: row and column in the image's patch grid, -1 where there is no patch
    slots: Tensor  # int64 [K, S]: flat position of each cell in the batch, -1 where there is none

    def pin_memory(self) -> Pictures:
        """A copy in page-locked memory; the loader calls it."""
        return Pictures(**{k: v.pin_memory() for k, v in self.__dict__.items()})

    def to(self, device: torch.device) -> Pictures:
        """A copy on the device."""
        return Pictures(**{k: v.to(device, non_blocking=True) for k, v in self.__dict__.items()})


@cache
def cell_places(plan: ImagePlan, side: int) -> Tensor:
    """int64 [R·C·s·s, 2]: patch row and column of each place of each cell, -1 outside the patch grid."""
    cells = torch.cartesian_prod(torch.arange(plan.rows), torch.arange(plan.columns)).view(-1, 1, 2)
    inner = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    places = (cells * side + inner).flatten(0, 1)
    outside = (places >= torch.tensor([plan.patch_rows, plan.patch_columns])).any(1, keepdim=True)
    return places.masked_fill(outside, -1)


def in_cells(patches: Tensor, plan: ImagePlan, side: int) -> Tensor:
    """bf16 [R·C·s·s, 3·P·P] of an image's patches [., 3, P, P] in reading order; zero outside the grid."""
    places = cell_places(plan, side)
    order = (places[:, 0] * plan.patch_columns + places[:, 1]).clamp_min(0)
    return patches.flatten(1)[order] * (places[:, :1] >= 0)


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, present: Tensor) -> Tensor:
        """bf16 [K, n, d] to the same; cos, sin fp32 [K, n, D/2]; absent patches are not read."""
        q, k, v = self.wqkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k = _rotate_half(q, cos, sin), _rotate_half(k, cos, sin)
        scores = q.transpose(1, 2).float() @ k.permute(0, 2, 3, 1).float() * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~present[:, None, None], -torch.inf)
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, present: Tensor) -> Tensor:
        """bf16 [K, n, d] to the same."""
        x = x + self.attn(self.norm1(x), cos, sin, present)
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

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """bf16 [K, S, d·s·s] of `Pictures`' patches and places, unfolded for the aligner, channel first."""
        present = places[..., 0] >= 0
        half = self.config.hidden_size // self.config.heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half
        frequencies = 1.0 / self.config.rope_theta**exponents
        angles = (places.unsqueeze(-1).float() * frequencies).flatten(2)
        cos, sin = angles.cos(), angles.sin()
        x = self.patch_embed.proj(patches)
        for block in self.blocks:
            x = block(x, cos, sin, present)
        x = self.norm(x) * present.unsqueeze(-1)
        return x.unflatten(1, (-1, self.config.downsample_ratio**2)).transpose(2, 3).flatten(2)


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


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(torch.bfloat16)
