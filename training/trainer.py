"""The backbone's training loop: phases by progress, one log line in a while, a state to go on from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cedar.training.assets import Assets
from cedar.training.batches import stream
from cedar.training.context import Batch, Context
from cedar.training.draft import DraftStages
from cedar.training.indexer import selection_loss
from cedar.training.layers import Gate
from cedar.training.network import TrainingNetwork
from cedar.training.optimiser import make_optimisers
from cedar.training.scoring import score
from cedar.training.settings import Phase, Settings
from torch import Tensor


class Trainer:
    """Owns the network, its optimisers and the run's folder."""

    def __init__(
        self, assets: Assets, settings: Settings, folder: Path, device: torch.device, *, resume: bool = False
    ) -> None:
        self.assets, self.settings, self.folder, self.device = assets, settings, folder, device
        self.network = TrainingNetwork(assets.config, assets.compressed).to(device)
        self.optimisers = make_optimisers(
            self.network,
            lr=settings.lr,
            embedding_lr=settings.embedding_lr,
            weight_decay=settings.weight_decay,
        )
        self._base_rates = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.gates = [m for m in self.network.modules() if isinstance(m, Gate)]
        self.step = 0
        self.elapsed_s = 0.0
        self.final_scores: dict[str, float] = {}
        self._averages: dict[str, Tensor] = {}
        self._averaged = 0
        if resume:
            self._load()
        else:
            (folder / "log.jsonl").write_text("")

    def log(self, line: dict[str, Any]) -> None:
        """Append one JSON line."""
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()}
        with (self.folder / "log.jsonl").open("a") as out:
            out.write(json.dumps(rounded) + "\n")
        print(json.dumps(rounded), flush=True)

    def untrained_drafts(self) -> dict[str, Tensor]:
        """Fresh draft stages, by published name."""
        return dict(DraftStages(self.assets.config).state_dict())

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self.settings.steps:
            return self.step / self.settings.steps
        return self.elapsed_s / self.settings.seconds

    def run(self) -> None:
        """Train until done; evaluate and checkpoint on the way and at the end."""
        before, begun = self.elapsed_s, time.monotonic()
        checkpointed, evaluated = begun, begun
        phase: Phase | None = None
        batches: Iterator[Batch] = iter(())
        while self.progress < 1.0:
            wanted = self.settings.phase(self.progress)
            if wanted is not phase:
                phase = wanted
                del batches
                batches = self.batches(phase)
                self.log(
                    {"phase": phase.name, "step": self.step, "elapsed_s": self.elapsed_s, **self._peak()}
                )
            self._train(next(batches), phase)
            self.elapsed_s = before + time.monotonic() - begun
            now = time.monotonic()
            if now - checkpointed > self.settings.checkpoint_every_s:
                checkpointed = now
                self.save()
            if now - evaluated > self.settings.evaluate_every_s:
                evaluated = now
                self.evaluate({512: 16, 2048: 8})
        self.save()

    def batches(self, phase: Phase) -> Iterator[Batch]:
        """The phase's stream; a resumed run draws other conversations than the first part did."""
        seed = self.settings.seed * 1_000_003 + self.step
        return stream(
            self.assets.tokenizer, self.assets.config, phase.shape, seed=seed, workers=self.settings.workers
        )

    def evaluate(self, lengths: dict[int, int], singles: int = 32, seed: int = 7) -> dict[str, float]:
        """Score and log."""
        begun = time.monotonic()
        scores = score(
            self.network, self.assets.tokenizer, lengths, seed=seed, device=self.device, singles=singles
        )
        self.final_scores = scores
        self.log(
            {"step": self.step, "elapsed_s": self.elapsed_s, "took_s": time.monotonic() - begun, **scores}
        )
        return scores

    def save(self) -> None:
        """Write `state.pt`, whole or not at all."""
        state = {
            "network": self.network.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        part = self.folder / "state.part"
        torch.save(state, part)
        part.replace(self.folder / "state.pt")

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def _train(self, batch: Batch, phase: Phase) -> None:
        settings = self.settings
        batch = batch.to(self.device)
        context = Context(self.assets.config, batch, all_dense=phase.all_dense)
        logits = self.network(context)
        losses = _losses(logits, batch)
        selection = selection_loss(context)
        (losses["loss"] + settings.selection_weight * selection).backward()
        params = [p for p in self.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, settings.clip)
        rate = settings.rate(self.progress)
        for optimiser, bases in zip(self.optimisers, self._base_rates, strict=True):
            for group, base in zip(optimiser.param_groups, bases, strict=True):
                group["lr"] = base * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        for gate in self.gates:
            gate.balance(settings.balance_rate * rate)
        self.step += 1
        self._note({**losses, "selection": selection, "grad": norm}, phase, batch, rate)

    def _peak(self) -> dict[str, float]:
        """Most device memory used since the last call, GiB."""
        if self.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return {"peak_gib": peak}

    def _note(self, values: dict[str, Tensor], phase: Phase, batch: Batch, rate: float) -> None:
        for name, value in values.items():
            value = value.detach()
            self._averages[name] = value if self._averaged == 0 else self._averages[name] + value
        self._averaged += 1
        if self._averaged < self.settings.log_every:
            return
        means = {name: float(value) / self._averaged for name, value in self._averages.items()}
        self._averaged = 0
        self.log(
            {
                "step": self.step,
                "elapsed_s": self.elapsed_s,
                "phase": phase.name,
                "tokens": batch.ids.numel(),
                "rate": rate,
                **means,
            }
        )


def _losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Weighted loss of predicting every next token; the share of answer tokens that are right."""
    targets, weight = batch.ids[:, 1:], batch.loss_weight[:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none"
    ).view(weight.shape)
    answer = (weight >= 1.0).float()
    with torch.no_grad():
        right = (logits[:, :-1].argmax(-1) == targets).float()
        accuracy = (right * answer).sum() / answer.sum().clamp_min(1)
        text = (each * (1 - answer) * (weight > 0)).sum() / ((1 - answer) * (weight > 0)).sum().clamp_min(1)
    return {
        "loss": (each * weight).sum() / weight.sum().clamp_min(1e-6),
        "answer_loss": (each * answer).sum() / answer.sum().clamp_min(1),
        "text_loss": text,
        "answer_accuracy": accuracy,
    }
