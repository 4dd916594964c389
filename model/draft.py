"""The draft stages (DSpark): tokens proposed from what the backbone knew at the last position (spec §9, §14).

Each stage keeps a ring of window keys of its own, made of the backbone's mean streams at the target layers
("taps"). A block of K positions, the just-sampled token and then noise, runs the stages at once, every row of
it reading the whole ring and the whole block; tokens are then chosen left to right, each with a bigram of the
one before. Rings hold accepted positions only, so a rejected proposal leaves no trace in them.

Letters: S sequences, K block positions, N rows, W window, D head dim, d hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.mhc import mhc_collapse
from cedar.kernels.norm import rms_norm
from cedar.kernels.rope import apply_rope
from cedar.model.block import Layer
from cedar.model.config import DraftConfig, ModelConfig
from cedar.model.dense import Dense, Plain
from cedar.model.errors import InputError
from cedar.model.sources import Selection
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step, WindowPlan
from cedar.model.step_rows import last, rows_of
from cedar.model.text import TextNetwork


@dataclass(frozen=True, eq=False, repr=False)
class RingKeys:
    """How one stage makes window keys of main rows."""

    wkv: Dense  # [D, d]
    norm: torch.Tensor  # bf16 [D]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DraftRings:
    """From taps to the window keys of every stage. All that Prefill needs of the draft module."""

    main_proj: Dense  # [d, targets * d]
    main_norm: torch.Tensor  # bf16 [d]
    keys: tuple[RingKeys, ...]
    freqs: torch.Tensor  # fp32 [R/2]
    eps: float
    window: int

    def write(
        self,
        memory: KVMemory,
        taps: Sequence[torch.Tensor],
        rows: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Put some rows of the taps, bf16 [N, d] each, into the rings.

        `rows`, `slots`, `positions` int64 [n] on the memory's device; positions of one slot lie within W.
        """
        main = rms_norm(self.main_proj(torch.cat([tap[rows] for tap in taps], 1)), self.main_norm, self.eps)
        for stage, key in enumerate(self.keys):
            latent = rms_norm(key.wkv(main), key.norm, self.eps)
            packed = pack_window_rows(apply_rope(latent, positions, self.freqs))
            memory.draft_rings[slots, stage, positions % self.window] = packed

    def write_step(self, step: Step, taps: Sequence[torch.Tensor]) -> None:
        """The last W rows of every sequence of a step whose rows have all run the target layers."""
        each = last([end - begin for _, begin, end in step.spans], self.window)
        self.write(step.memory, taps, *rows_of(step, each))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DraftHead:
    """What turns the last stage's streams into proposals."""

    norm: torch.Tensor  # bf16 [d]
    markov_embedding: torch.Tensor  # bf16 [V, rank]
    markov_head: Plain  # [V, rank]
    confidence: Plain  # [1, d + rank]


@dataclass(frozen=True, eq=False)
class Proposals:
    """K tokens for each of S sequences, and how sure the stages are of each."""

    tokens: torch.Tensor  # int64 [S, K]
    confidence: torch.Tensor  # fp32 [S, K], the logit of being accepted
    logits: torch.Tensor  # fp32 [S, K, V]

    def chosen(self, rooms: Sequence[int], least: float = 0.0) -> list[list[int]]:
        """What is worth verifying: for each sequence at most `rooms` tokens, and none from where the
        likelihood that it and all before it are accepted falls below `least`.
        """
        together = self.confidence.double().sigmoid().cumprod(1).tolist()
        result = []
        for row, likely, room in zip(self.tokens.tolist(), together, rooms, strict=True):
            sure = next((place for place, p in enumerate(likely) if p < least), len(row))
            result.append(row[: max(0, min(sure, room))])
        return result


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DraftNetwork:
    """The draft module of one process; `stages` is empty and `head` None where only rings are kept."""

    config: ModelConfig
    draft: DraftConfig
    rings: DraftRings
    stages: tuple[Layer, ...]
    head: DraftHead | None

    def propose(self, text: TextNetwork, memory: KVMemory, seqs: Sequence[SequenceState]) -> Proposals:
        """Tokens to follow `ids[length]`, the token that was chosen last and has not run.

        Raises InputError where only rings are kept.
        """
        if self.head is None:
            raise InputError("stage", "prefill", "'decode' or None to propose tokens")
        block = self.draft.block_size
        step = BlockStep(memory, self.config, seqs, block)
        last = torch.tensor([seq.ids[seq.length] for seq in seqs], device=step.device)
        ids = torch.full((len(seqs), block), self.draft.noise_token_id, device=step.device)
        ids[:, 0] = last
        streams, pre = text.enter(text.embedding[ids.flatten()])
        for stage in self.stages:
            streams, pre = stage.run(streams, pre, step, Selection(), None)
        return self._choose(text, self.head, mhc_collapse(streams, pre), last)

    def _choose(
        self, text: TextNetwork, head: DraftHead, hidden: torch.Tensor, before: torch.Tensor
    ) -> Proposals:
        """From collapsed rows bf16 [S·K, d] and the tokens int64 [S] ahead of the proposals."""
        normed = rms_norm(hidden, head.norm, self.config.rms_norm_eps)
        base = text.head(normed, torch.float32).view(before.shape[0], self.draft.block_size, -1)
        logits, tokens, bigrams = [], [], []
        for place in range(self.draft.block_size):
            bigrams.append(head.markov_embedding[before])
            logits.append(base[:, place] + head.markov_head(bigrams[-1], torch.float32))
            before = logits[-1].argmax(-1)
            tokens.append(before)
        known = torch.cat((hidden, torch.stack(bigrams, 1).flatten(0, 1)), 1)
        confidence = head.confidence(known, torch.float32).view(-1, self.draft.block_size)
        return Proposals(torch.stack(tokens, 1), confidence, torch.stack(logits, 1))


class BlockStep(Step):
    """K rows of each sequence from position `length` on, as draft stages see them.

    A row reads its stage's ring, positions length-W to length-1, and all K rows of its block; nothing is
    written.
    """

    def __init__(
        self, memory: KVMemory, config: ModelConfig, seqs: Sequence[SequenceState], block: int
    ) -> None:
        super().__init__(memory, config, [(seq, seq.length, seq.length + block) for seq in seqs])
        self.direct = False
        self._block = block
        self._first_stage = config.layers

    def open_window(self, layer: int) -> WindowPlan:
        """`rings of the S sequences | the block's rows`, and which are the block's."""
        ring = self.memory.draft_rings[self.slots, layer - self._first_stage].flatten(0, 1)
        return WindowPlan(torch.cat((ring, ring.new_empty(self.rows, ring.shape[1]))), self._own_places)

    def close_window(self, layer: int, buffer: torch.Tensor) -> None:
        """A block's own keys are of no use to the next one."""

    def _plan_window(self, decoder: bool) -> torch.Tensor:
        """int64 [N, W + K]."""
        window, count = self._window, len(self.spans)
        number = torch.arange(count).unsqueeze(1)
        start = torch.tensor([seq.draft_start for seq, _, _ in self.spans]).unsqueeze(1)
        past = self._begins.unsqueeze(1) + torch.arange(-window, 0)
        ring = torch.where(past >= start.clamp_min(0), number * window + past % window, -1)
        own = count * window + self._offsets.unsqueeze(1) + torch.arange(self._block)
        return torch.cat((ring, own), 1)[self._seq].to(self.device)
