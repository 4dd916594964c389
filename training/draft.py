"""The differentiable draft stages (DSpark): blocks of tokens after an anchor, proposed at once (spec §9).

Letters: N = B·T main positions, A anchors, K block positions, W window, H heads, D head dim, d hidden, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from cedar.model.config import DraftConfig, ModelConfig
from cedar.model.schedule import LayerMode, LayerPlan
from cedar.training.context import frequencies
from cedar.training.fused import collapse, collapse_norm, expand, rotate
from cedar.training.layers import Layer
from cedar.training.matrices import Dense, Norm, Plain
from cedar.training.quantise import fp8_activation
from torch import Tensor, nn

if TYPE_CHECKING:
    from cedar.training.network import TrainingNetwork


@dataclass(frozen=True, kw_only=True, eq=False)
class Anchors:
    """Places to draft from: the main position p of row b, and the tokens after it."""

    row: Tensor  # int64 [A]
    position: Tensor  # int64 [A], p
    tokens: Tensor  # int64 [A, K + 1], positions p+1 to p+K+1
    begins: Tensor  # int64 [A], main positions below have no hidden state
    main_tokens: int  # T


class MarkovHead(nn.Module):
    """A low-rank bigram added to the logits."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.embed = Plain(vocab, rank)
        self.head = Plain(vocab, rank, 0.1)


class ConfidenceHead(nn.Module):
    """How likely a proposal is to be accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Plain(1, width, 0.1)


class Stage(Layer):
    """One draft stage; the first one also projects the taps, the last one also proposes."""

    def __init__(self, config: ModelConfig, draft: DraftConfig, number: int) -> None:
        plan = LayerPlan(
            layer=config.layers + number,
            mode=LayerMode.SWA,
            ratio=0,
            kv_source=None,
            index_source=None,
            uses_candidates=False,
            makes_candidates=False,
            has_engram=False,
            draft_target=False,
        )
        super().__init__(config, plan, draft.routed_experts, draft.experts_per_token)
        d = config.hidden_size
        if number == 0:
            self.main_proj = Dense(d, d * len(draft.target_layer_ids))
            self.main_norm = Norm(d, config.rms_norm_eps)
        if number == draft.stages - 1:
            self.norm = Norm(d, config.rms_norm_eps)
            self.markov_head = MarkovHead(config.vocab_size, draft.markov_rank)
            self.confidence_head = ConfidenceHead(d + draft.markov_rank)

    def block(self, streams: Tensor, pre: Tensor, ring: Tensor, readable: Tensor, angles: _Angles) -> _State:
        """Streams bf16 [A·K, hc, d] and pre after the stage; ring bf16 [A, W, D], readable bool [A, W]."""
        eps = self.config.rms_norm_eps
        pre_attn, post, comb = self.mix("hc_attn", streams)
        x = collapse_norm(streams, pre, self.attn_norm.weight, eps)
        streams = expand(streams, self._attend(x, ring, readable, angles), post, comb)
        pre_ffn, post, comb = self.mix("hc_ffn", streams)
        x = collapse_norm(streams, pre_attn, self.ffn_norm.weight, eps)
        text = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        return expand(streams, self.ffn(x, text), post, comb), pre_ffn

    def key(self, x: Tensor, angles: _Angles) -> Tensor:
        """Window keys bf16 [n, D] of x bf16 [n, d]."""
        return fp8_activation(rotate(self.attn.kv_norm(self.attn.wkv(x)), *angles))

    def _attend(self, x: Tensor, ring: Tensor, readable: Tensor, angles: _Angles) -> Tensor:
        attn, (anchors, width, channels) = self.attn, ring.shape
        latent = attn.q_norm(attn.wq_a(x))
        q = rotate(attn.wq_b(latent).unflatten(1, (self.config.heads, -1)), *angles)
        keys = torch.cat((ring, self.key(x, angles).view(anchors, -1, channels)), 1)
        q = q.view(anchors, -1, channels)  # [A, K·H, D]
        scores = (q.float() @ keys.float().transpose(1, 2)) * channels**-0.5
        own = keys.shape[1] - width
        mask = torch.nn.functional.pad(readable, (0, own), value=True).unsqueeze(1)
        scores = scores.masked_fill(~mask, -torch.inf)
        sink = attn.attn_sink.repeat(own).view(1, -1, 1).expand(anchors, -1, 1)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        o = (p @ keys.float()).to(torch.bfloat16).view(-1, self.config.heads, channels)
        cos, sin = angles
        return attn.project(rotate(o, cos, -sin))


_Angles = tuple[Tensor, Tensor]
_State = tuple[Tensor, Tensor]


class DraftStages(nn.Module):
    """All stages, named `mtp.S` as published."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.draft is None:
            raise ValueError("config has no draft module, must have one")
        self.config, self.draft = config, config.draft
        self.mtp = nn.ModuleList(Stage(config, config.draft, n) for n in range(config.draft.stages))

    def forward(
        self, network: TrainingNetwork, taps: list[Tensor], anchors: Anchors
    ) -> tuple[Tensor, Tensor]:
        """Logits fp32 [A, K, V], each given the true token before it, and confidence logits fp32 [A, K].

        `taps`: mean streams bf16 [N, d] of the target layers. The network's own weights get no gradient.
        """
        config, block = self.config, self.draft.block_size
        device = anchors.row.device
        stages = [cast("Stage", stage) for stage in self.mtp]
        first, last = stages[0], stages[-1]
        freqs = frequencies(config.rope_dim, config.rope_theta, None, device)
        main = first.main_norm(first.main_proj(torch.cat(taps, 1)))
        main_positions = torch.arange(anchors.main_tokens, device=device)
        main_angles = _angles(main_positions, freqs, main.shape[0] // anchors.main_tokens)
        places = anchors.position.unsqueeze(1) + torch.arange(1 - config.window, 1, device=device)
        readable = places >= anchors.begins.clamp_min(0).unsqueeze(1)
        gathered = anchors.row.unsqueeze(1) * anchors.main_tokens + places.clamp_min(0)
        after = anchors.position.unsqueeze(1) + 1 + torch.arange(block, device=device)
        angles = _angles(after.flatten(), freqs, 1)

        ids = torch.full_like(after, self.draft.noise_token_id)
        ids[:, 0] = anchors.tokens[:, 0]
        rows = torch.nn.functional.embedding(ids.flatten(), network.embed.weight.detach())
        streams = rows.to(torch.bfloat16).unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre = torch.zeros(rows.shape[0], config.hc_mult, device=device)
        pre[:, 0] = 1.0
        for stage in stages:
            ring = stage.key(main, main_angles)[gathered]
            streams, pre = stage.block(streams, pre, ring, readable, angles)
        hidden = collapse(streams, pre)
        head = network.head.weight.detach().to(torch.bfloat16).float()
        base = last.norm(hidden).float() @ head.T
        markov = last.markov_head
        before = torch.nn.functional.embedding(anchors.tokens[:, :block].flatten(), markov.embed.weight)
        before = before.to(torch.bfloat16)
        logits = base + markov.head.full(before)
        confidence = last.confidence_head.proj.full(torch.cat((hidden, before), 1))
        return logits.view(-1, block, logits.shape[1]), confidence.view(-1, block)


def _angles(positions: Tensor, freqs: Tensor, repeat: int) -> _Angles:
    angles = (positions.float().unsqueeze(-1) * freqs).repeat(repeat, 1)
    return angles.cos(), angles.sin()
