"""The differentiable indexer: selection by index scores, taught by where attention goes (spec §3).

Its parameters learn from nothing else: what it reads of the network is detached. Letters: B rows, T tokens, M
entries, S sampled queries, Hi heads, Di channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cedar.model.config import ModelConfig
from cedar.model.schedule import LayerMode, LayerPlan
from cedar.training.context import Context
from cedar.training.fused import rotate, wide
from cedar.training.matrices import Dense, Norm, Plain
from cedar.training.quantise import fp4_index
from torch import Tensor, nn

if TYPE_CHECKING:
    from cedar.training.attention import Entries


def weigh(products: Tensor, weights: Tensor) -> Tensor:
    """[B, S, M] of q·k [B, S, Hi, M] and head weights [B, S, Hi]."""
    return (products.relu().to(weights.dtype) * weights.unsqueeze(-1)).sum(2)


class Indexer(nn.Module):
    """Scores of the source's index keys."""

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        heads, width = config.index_heads, config.index_head_dim
        self.wq_b = Dense(heads * width, config.q_lora_rank)
        self.weights_proj = Plain(heads, config.hidden_size)
        produces = plan.mode is LayerMode.FULL
        self.wk = Plain(width, config.head_dim) if produces else None
        self.k_norm = Norm(width, config.rms_norm_eps) if produces else None

    def forward(self, x: Tensor, q_latent: Tensor, context: Context, entries: Entries) -> None:
        """Set the selection of `entries` for every position."""
        if self.wk is not None and self.k_norm is not None:
            cos, sin = context.angles(True, self.plan.ratio)
            key = self.k_norm(self.wk(entries.latent.detach()))
            key = rotate(key, cos, sin)
            key = (fp4_index(key) if context.packed else key).view(context.rows, -1, key.shape[1])
            if context.loaded is not None:
                key = context.loaded.over(key, len(context.written), 1, self.plan.ratio)
            entries.keys = key
            context.written.append((entries.values.detach(), key.detach()))
        cos, sin = context.angles(True)
        q = self.wq_b(q_latent.detach()).unflatten(1, (self.config.index_heads, -1))
        q = fp4_index(rotate(q, cos, sin)).view(context.rows, context.tokens, *q.shape[1:])
        scale = q.shape[-1] ** -0.5 * self.config.index_heads**-0.5
        weights = self.weights_proj(x.detach())
        weights = (weights if x.is_cuda else wide(weights)).view(context.rows, context.tokens, -1) * scale
        visible = context.visible(self.plan.ratio)
        keys = entries.keys
        if torch.is_grad_enabled():
            self._open_lesson(q, weights, keys, visible, context)
        with torch.no_grad():
            entries.mask = self._select(q, weights, keys, visible, context)

    def _open_lesson(
        self, q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, context: Context
    ) -> None:
        queries = context.batch.queries
        rows = torch.arange(context.rows, device=q.device).unsqueeze(1)
        asked = q[rows, queries]
        products = (asked.flatten(1, 2).float() @ keys.float().transpose(1, 2)).unflatten(1, asked.shape[1:3])
        scores = weigh(products, weights[rows, queries].float())
        selections = context.selections
        selections.taught.append((scores.masked_fill(~visible[queries], -torch.inf), []))
        here = len(selections.taught) - 1
        selections.learners = [here]
        if self.plan.makes_candidates:
            selections.pool_learner = here
        elif self.plan.uses_candidates and selections.pool_learner is not None:
            selections.learners = [selections.pool_learner, here]

    def _select(self, q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, context: Context) -> Tensor:
        config = self.config
        everything = visible.unsqueeze(0).expand(context.rows, -1, -1)
        if context.all_dense:
            return everything
        wider = keys if keys.is_cuda else wide(keys)
        products = q.flatten(1, 2).to(wider.dtype) @ wider.transpose(1, 2)
        scores = weigh(products.unflatten(1, q.shape[1:3]), weights)
        scores = scores.masked_fill(~everything, -torch.inf)
        if self.plan.makes_candidates and context.pool:
            context.selections.pool = _pool(scores, visible, config)
        if self.plan.uses_candidates and context.selections.pool is not None:
            scores = scores.masked_fill(~context.selections.pool, -torch.inf)
        chosen = _top(scores, config.index_topk)
        dense = context.batch.dense.view(-1, 1, 1)
        return (chosen & everything) | (dense & everything)


def _top(scores: Tensor, k: int) -> Tensor:
    """bool mask of the k greatest. Of equals the lower position on the CPU, all of them on an accelerator."""
    if scores.shape[-1] <= k:
        return scores > -torch.inf
    if not scores.is_cuda:
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return mask & (scores > -torch.inf)
    least = scores.topk(k, -1).values[..., -1:]
    return (scores >= least) & (scores > -torch.inf)


def _pool(scores: Tensor, visible: Tensor, config: ModelConfig) -> Tensor:
    """bool [B, T, M]: positions of kept blocks; the newest visible block is always kept."""
    block, count = config.candidate_block_size, scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -count % block), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block)).amax(-1)
    newest = (visible.sum(-1) - 1) // block
    is_newest = torch.arange(best.shape[-1], device=scores.device) == newest.unsqueeze(-1)
    kept = _top(best.masked_fill(is_newest, torch.inf), config.candidate_topk_blocks)
    return kept.unsqueeze(-1).expand(*kept.shape, block).flatten(-2)[..., :count]


def selection_loss(context: Context) -> Tensor:
    """KL of each source's index distribution from the attention of the layers that read its selection.

    Weighted by how much of the attention went to global entries at all.
    """
    losses = []
    for scores, masses in context.selections.taught:
        if not masses:
            continue
        mass = torch.stack(masses).sum(0)
        total = mass.sum(-1, keepdim=True)
        target = mass / total.clamp_min(1e-9)
        readable = mass > 0
        logs = torch.log_softmax(scores, -1).masked_fill(~readable, 0.0)
        divergence = (target * (target.clamp_min(1e-9).log() - logs)).masked_fill(~readable, 0.0).sum(-1)
        weight = total.squeeze(-1)
        losses.append((divergence * weight).sum() / weight.sum().clamp_min(1e-6))
    if not losses:
        return torch.zeros((), device=context.device)
    return torch.stack(losses).sum()
