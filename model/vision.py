"""The vision tower and aligner: patches to the prompt rows of an image (spec §8, §14).

Arithmetic: linears in float64 with a bf16 result; RMSNorm, RoPE and attention in float32; silu rounded to
bf16 before the product. Under it every published value comes out bit for bit.

Letters: n patches, d tower width, H heads, D head dim, R x C token grid, T = R(C + 1) + 2 span positions, E
text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from cedar.model.config import VisionConfig
from cedar.model.errors import CheckpointError
from cedar.model.images import END, NEWLINE, SLOT, START, ImagePlan, token_types
from cedar.model.prompt_errors import ImageError
from torch import Tensor

_BF16: Final = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Linear:
    """bf16 weight `[out, in]` and, where the spec has one, bias `[out]`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """bf16 `[..., in]` to bf16 `[..., out]`, accumulated in float64."""
        bias = None if self.bias is None else self.bias.double()
        return F.linear(x.double(), self.weight.double(), bias).to(_BF16)


@dataclass(frozen=True, eq=False)
class VisionBlock:
    """One pre-norm block of the tower."""

    norm1: Tensor
    qkv: Linear
    out: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class VisionTower:
    """The tower, the aligner and the three learned vectors of a span."""

    config: VisionConfig
    embed: Linear
    blocks: tuple[VisionBlock, ...]
    norm: Tensor
    align1: Linear
    align2: Linear
    image_start: Tensor
    image_newline: Tensor
    image_end: Tensor

    @classmethod
    def from_tensors(
        cls, config: VisionConfig, tensors: Mapping[str, Tensor], *, text_width: int
    ) -> VisionTower:
        """The tower from tensors under their published names; other names are ignored.

        `text_width` is the text network's hidden size. Raises `CheckpointError` naming a missing or
        misshapen tensor.
        """
        return _Loader(tensors).tower(config, text_width)

    def features(self, patches: Tensor, plan: ImagePlan) -> Tensor:
        """bf16 patches `[n, 3, P, P]` to bf16 slots `[R·C, E]` in reading order. Raises `ImageError`."""
        side = self.config.patch_size
        expected = [plan.patch_rows * plan.patch_columns, 3, side, side]
        if list(patches.shape) != expected or patches.dtype != _BF16:
            raise ImageError("patches", (list(patches.shape), patches.dtype), f"bfloat16 of shape {expected}")
        x = self.embed(patches.flatten(1))
        cos, sin = rope_tables(plan.patch_rows, plan.patch_columns, self.config)
        cos, sin = cos.to(x.device), sin.to(x.device)
        for block in self.blocks:
            x = x + self._attention(block, self._norm(x, block.norm1), cos, sin)
            x = x + _swiglu(block, self._norm(x, block.norm2))
        x = self._unfold(self._norm(x, self.norm), plan)
        return self.align2(F.gelu(self.align1(x).float()).to(_BF16))

    def span(self, patches: Tensor, plan: ImagePlan) -> Tensor:
        """bf16 patches `[n, 3, P, P]` to the bf16 rows `[T, E]` of every position of the image's span."""
        slots = self.features(patches, plan)
        kinds = torch.tensor(token_types(plan.rows, plan.columns), device=slots.device)
        rows = slots.new_empty((plan.span_length, slots.shape[1]))
        rows[kinds == START] = self.image_start
        rows[kinds == NEWLINE] = self.image_newline
        rows[kinds == END] = self.image_end
        rows[kinds == SLOT] = slots
        return rows

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (x * scale * weight.float()).to(_BF16)

    def _attention(self, block: VisionBlock, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.config.heads
        q, k, v = block.qkv(x).view(x.shape[0], 3, heads, -1).unbind(1)
        q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
        scale = q.shape[-1] ** -0.5
        mixed = torch.empty_like(v)
        for h in range(heads):  # one head's [n, n] scores at a time: 340 MB for the largest image
            scores = q[:, h].float() @ k[:, h].float().T * scale
            mixed[:, h] = (scores.softmax(-1) @ v[:, h].float()).to(_BF16)
        return block.out(mixed.flatten(1))

    def _unfold(self, x: Tensor, plan: ImagePlan) -> Tensor:
        """`[n, d]` on the patch grid to `[R·C, d·s·s]`: s x s windows of the zero-padded grid, channel
        first.
        """
        side = self.config.downsample_ratio
        x = x.view(plan.patch_rows, plan.patch_columns, -1)
        bottom, right = plan.rows * side - plan.patch_rows, plan.columns * side - plan.patch_columns
        x = F.pad(x, (0, 0, 0, right, 0, bottom))
        x = x.view(plan.rows, side, plan.columns, side, -1)
        return x.permute(0, 2, 4, 1, 3).reshape(plan.rows * plan.columns, -1)


def rope_tables(rows: int, columns: int, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 `[n, D/2]`: a patch's row turns the first quarter's frequencies, its column the
    second's.
    """
    half = config.hidden_size // config.heads // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
    frequencies = 1.0 / config.rope_theta**exponents
    row = torch.arange(rows, dtype=torch.float32).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float32).repeat(rows)
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], -1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """bf16 `[n, H, D]` with channel j of the first half and of the second turned as a pair by angle j."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(_BF16)


def _swiglu(block: VisionBlock, x: Tensor) -> Tensor:
    gate, up = block.gate_up(x).chunk(2, -1)
    return block.down(F.silu(gate.float()).to(_BF16) * up)


class _Loader:
    """Takes tensors by name, checking shape and dtype."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(name, "missing", f"a tensor of shape {list(shape)}")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} shape", list(tensor.shape), f"{list(shape)}")
        if tensor.dtype != _BF16:
            raise CheckpointError(f"{name} dtype", tensor.dtype, "bfloat16")
        return tensor

    def linear(self, name: str, out: int, width: int, *, bias: bool) -> Linear:
        weight = self.take(f"{name}.weight", out, width)
        return Linear(weight, self.take(f"{name}.bias", out) if bias else None)

    def block(self, name: str, config: VisionConfig) -> VisionBlock:
        width, inner = config.hidden_size, config.intermediate_size
        return VisionBlock(
            norm1=self.take(f"{name}.norm1.weight", width),
            qkv=self.linear(f"{name}.attn.wqkv", 3 * width, width, bias=True),
            out=self.linear(f"{name}.attn.wo", width, width, bias=True),
            norm2=self.take(f"{name}.norm2.weight", width),
            gate_up=self.linear(f"{name}.mlp.w1", 2 * inner, width, bias=False),
            down=self.linear(f"{name}.mlp.w2", width, inner, bias=False),
        )

    def tower(self, config: VisionConfig, text_width: int) -> VisionTower:
        width = config.hidden_size
        return VisionTower(
            config=config,
            embed=self.linear("vision.patch_embed.proj", width, 3 * config.patch_size**2, bias=True),
            blocks=tuple(self.block(f"vision.blocks.{i}", config) for i in range(config.layers)),
            norm=self.take("vision.norm.weight", width),
            align1=self.linear("aligner.w1", text_width, width * config.downsample_ratio**2, bias=True),
            align2=self.linear("aligner.w2", text_width, text_width, bias=True),
            image_start=self.take("image_start", text_width),
            image_newline=self.take("image_newline", text_width),
            image_end=self.take("image_end", text_width),
        )
