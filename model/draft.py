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
from functools import cached_property
from typing import Final

import torch
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.mhc import mhc_collapse
from cedar.kernels.move_rows import move_rows
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

FIELDS: Final = 4
ID, POSITION, SLOT, START = range(
    FIELDS
)  # the last token, its position, the sequence's slot and `draft_start`


def draft_fields(seqs: Sequence[SequenceState], rows: int) -> torch.Tensor:
    """int64 [FIELDS, rows] on the host; rows past the last repeat the first."""
    columns = [(seq.ids[seq.length], seq.length, seq.slot, seq.draft_start) for seq in seqs]
    columns += columns[:1] * (rows - len(columns))
    return torch.tensor(columns).T.contiguous()


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
        slots: torch.Tensor,
        positions: torch.Tensor,
        stays: torch.Tensor,
    ) -> None:
        """Put rows of the taps, bf16 [N, d] each, into the rings.

        `slots`, `positions` int64 [N] and `stays` bool [N], which of the rows, on the memory's device;
        positions of those in one slot lie within W.
        """
        main = rms_norm(self.main_proj(torch.cat(list(taps), 1)), self.main_norm, self.eps)
        stages, row = memory.draft_rings.shape[1], memory.draft_rings.shape[3]
        places = slots * (stages * self.window) + positions % self.window
        every = torch.arange(main.shape[0], device=main.device)
        for stage, key in enumerate(self.keys):
            latent = rms_norm(key.wkv(main), key.norm, self.eps)
            packed = pack_window_rows(apply_rope(latent, positions, self.freqs))
            goal = torch.where(stays, places + stage * self.window, -1)
            move_rows(packed, every, memory.draft_rings.view(-1, row), goal)

    def write_step(self, step: Step, taps: Sequence[torch.Tensor]) -> None:
        """The last W rows of every sequence of a step whose rows have all run the target layers."""
        each = last([end - begin for _, begin, end in step.spans], self.window)
        rows, slots, positions = rows_of(step, each)
        self.write(
            step.memory,
            [tap[rows] for tap in taps],
            slots,
            positions,
            torch.ones_like(rows, dtype=torch.bool),
        )


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

    def propose(self, text: TextNetwork, memory: KVMemory, fields: torch.Tensor) -> Proposals:
        """Tokens to follow those that were chosen last and have not run, of `fields` int64 [FIELDS, S] on the
        memory's device.

        Raises InputError where only rings are kept.
        """
        if self.head is None:
            raise InputError("stage", "prefill", "'decode' or None to propose tokens")
        block = self.draft.block_size
        step, before = BlockStep(memory, self.config, fields, block), fields[ID]
        ids = torch.full((fields.shape[1], block), self.draft.noise_token_id, device=step.device)
        ids[:, 0] = before
        streams, pre = text.enter(text.embedding[ids.flatten()])
        for stage in self.stages:
            streams, pre = stage.run(streams, pre, step, Selection(), None)
        return self._choose(text, self.head, mhc_collapse(streams, pre), before)

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
    """K rows of each sequence from the position of its last token on, as draft stages see them.

    A row reads its stage's ring, the W positions before that, and all K rows of its block; nothing is
    written. Made of `fields` int64 [FIELDS, S] on the memory's device, by shapes alone.
    """

    def __init__(self, memory: KVMemory, config: ModelConfig, fields: torch.Tensor, block: int) -> None:
        self.memory = memory
        self.spans = ()
        self.device = memory.pages.device
        self.direct = False
        self.rows = fields.shape[1] * block
        self._fields = fields
        self._block = block
        self._window = config.window
        self._first_stage = config.layers
        self._window_rows: dict[bool, torch.Tensor] = {}
        self._ropes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [S·K]."""
        return (self._fields[POSITION].unsqueeze(1) + self._in_block).flatten()

    @cached_property
    def image_mask(self) -> torch.Tensor | None:
        """None: a decoded token is never inside an image."""
        return None

    @property
    def may_expand(self) -> bool:
        """False: made by shapes alone, for a graph."""
        return False

    def open_window(self, layer: int) -> WindowPlan:
        """`rings of the S sequences | the block's rows`, and which are the block's."""
        ring = self.memory.draft_rings[self._fields[SLOT], layer - self._first_stage].flatten(0, 1)
        return WindowPlan(torch.cat((ring, ring.new_empty(self.rows, ring.shape[1]))), self._own_places)

    @cached_property
    def _in_block(self) -> torch.Tensor:
        return torch.arange(self._block, device=self.device)

    @cached_property
    def _own_places(self) -> torch.Tensor:
        first = self._fields.shape[1] * self._window
        return torch.arange(first, first + self.rows, device=self.device)

    def _plan_window(self, decoder: bool) -> torch.Tensor:
        """int64 [N, W + K]."""
        window, count = self._window, self._fields.shape[1]
        number = torch.arange(count, device=self.device).unsqueeze(1)
        past = self._fields[POSITION].unsqueeze(1) + torch.arange(-window, 0, device=self.device)
        readable = past >= self._fields[START].clamp_min(0).unsqueeze(1)
        ring = torch.where(readable, number * window + past % window, -1)
        own = count * window + number * self._block + self._in_block
        return torch.cat((ring, own), 1).repeat_interleave(self._block, 0)
