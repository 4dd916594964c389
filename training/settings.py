"""Settings of a training run: what is trained in which order, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cedar.training.batches import BatchShape
from cedar.training.conversations import Mixture
from cedar.training.optimiser import Rates

DRAFT_RATES = Rates(matrices=2e-3, tables=6e-3, others=2e-3, mixers=2e-3, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run, `share` of its steps. `all_dense`: no selection at all."""

    name: str
    share: float
    shape: BatchShape
    all_dense: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of `steps` steps; shares of the phases, warm-up and decay are of these."""

    phases: tuple[Phase, ...]
    steps: int
    seed: int = 1
    rates: Rates = field(default_factory=Rates)
    draft_rates: Rates = DRAFT_RATES
    draft_steps: int
    warmup: float = 0.02
    decay: float = 0.8  # the last part of the run, in which the rate falls to a hundredth
    clip: float = 1.0
    balance_rate: float = 2e-3
    selection_weight: float = 0.5
    log_every: int = 50
    checkpoint_every_s: float = 60.0
    evaluate_every_s: float = 60.0
    final_singles: int = 0  # questions of each task asked at the end
    final_lengths: tuple[tuple[int, int], ...] = ()  # recall at the end: length, prompts
    workers: int = 0

    def with_changes(self, **changes: Any) -> Settings:
        """The same with some fields replaced."""
        return replace(self, **changes)

    def rate(self, progress: float) -> float:
        """The learning rate's factor at `progress` from 0 to 1: up, flat, down."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        return max(0.01, min(1.0, (1 - progress) / self.decay))

    def phase(self, progress: float) -> Phase:
        """The phase that `progress` falls in."""
        end = 0.0
        for phase in self.phases:
            end += phase.share
            if progress < end:
                return phase
        return self.phases[-1]


def full_settings(steps: int, tokens: int = 16384, workers: int = 14) -> Settings:
    """A full run: short and dense, then selecting, up to 8,192 tokens, and shorter again with every task.

    Every batch holds `tokens` tokens.
    """

    def shape(length: int, sparse: float, replay: float, mixture: Mixture) -> BatchShape:
        return BatchShape(rows=tokens // length, tokens=length, sparse=sparse, replay=replay, mixture=mixture)

    short = Mixture(facts=6, images=0.3, text=0.4, reserve=0.65)
    middle = Mixture(facts=8, images=0.3, text=0.35, reserve=0.5)
    many = Mixture(facts=16, images=0.2, text=0.2, reserve=0.5)
    phases = (
        Phase(name="dense-256", share=0.25, shape=shape(256, 0.0, 0.0, short), all_dense=True),
        Phase(name="dense-512", share=0.2, shape=shape(512, 0.0, 0.3, middle), all_dense=True),
        Phase(name="sparse-512", share=0.1, shape=shape(512, 0.75, 0.6, middle)),
        Phase(name="sparse-2048", share=0.17, shape=shape(2048, 0.75, 0.6, many)),
        Phase(name="sparse-8192", share=0.1, shape=shape(8192, 0.9, 0.6, many)),
        Phase(name="sparse-1024", share=0.18, shape=shape(1024, 0.9, 0.6, middle)),
    )
    return Settings(
        phases=phases,
        steps=steps,
        workers=workers,
        draft_steps=400,
        final_singles=256,
        final_lengths=((512, 128), (2048, 128), (8192, 64)),
    )


def smoke_settings(steps: int) -> Settings:
    """A few steps of tiny batches, every phase visited: for the CPU."""

    def shape(length: int, sparse: float) -> BatchShape:
        mixture = Mixture(facts=2, images=0.3, text=0.4, reserve=0.6)
        return BatchShape(rows=2, tokens=length, sparse=sparse, replay=0.5, queries=8, mixture=mixture)

    phases = (
        Phase(name="dense", share=0.5, shape=shape(128, 0.0), all_dense=True),
        Phase(name="sparse", share=0.5, shape=shape(192, 1.0)),
    )
    return Settings(
        phases=phases,
        steps=steps,
        rates=Rates(matrices=3e-3, tables=6e-3, others=3e-3),
        draft_steps=steps,
        warmup=0.0,
        log_every=1,
        checkpoint_every_s=1e9,
        evaluate_every_s=1e9,
    )
