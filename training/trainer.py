"""The backbone's training loop: phases by progress, one log line in a while, a state to go on from."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cedar.training.assets import Assets
from cedar.training.batches import Feed
from cedar.training.context import Batch, Context
from cedar.training.draft import DraftStages
from cedar.training.indexer import selection_loss
from cedar.training.layers import Gate
from cedar.training.network import TrainingNetwork
from cedar.training.optimiser import Optimisers
from cedar.training.replayed import Replayed, Tensors
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
        self.optimisers = Optimisers(self.network, settings.rates, settings.clip)
        self.gates = [m for m in self.network.modules() if isinstance(m, Gate)]
        self.step = 0
        self.elapsed_s = 0.0
        self.final_scores: dict[str, float] = {}
        self._averages: dict[str, Tensor] = {}
        self._averaged = 0
        self._waited_s = 0.0
        self._update = Replayed(self._updated)
        # not the default stream, on which nothing can be recorded
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if resume:
            self._load()
        else:
            (folder / "log.jsonl").write_text("")
        self.feed = Feed(
            assets.tokenizer,
            assets.config,
            [phase.shape for phase in settings.phases],
            seed=settings.seed * 1_000_003 + self.step,  # a resumed run draws other conversations
            workers=settings.workers,
        )

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
        return self.step / self.settings.steps

    def run(self) -> None:
        """Train until done; evaluate and checkpoint on the way and at the end."""
        with torch.cuda.stream(self.stream):
            self._run()

    def _run(self) -> None:
        before, begun = self.elapsed_s, time.monotonic()
        checkpointed, evaluated = begun, begun
        phase: Phase | None = None
        learn = Replayed(lambda tensors: tensors)
        while self.progress < 1.0:
            wanted = self.settings.phase(self.progress)
            if wanted is not phase:
                phase = wanted
                number = self.settings.phases.index(phase)
                del learn  # with the memory of what was recorded
                learn = Replayed(partial(self._learned, all_dense=phase.all_dense))
                self.log(
                    {"phase": phase.name, "step": self.step, "elapsed_s": self.elapsed_s, **self._peak()}
                )
            waiting = time.monotonic()
            batch = self.feed.next(number)
            self._waited_s += time.monotonic() - waiting
            self._train(batch, phase, learn)
            self.elapsed_s = before + time.monotonic() - begun
            now = time.monotonic()
            if now - checkpointed > self.settings.checkpoint_every_s:
                checkpointed = now
                self.save()
            if now - evaluated > self.settings.evaluate_every_s:
                evaluated = now
                self.evaluate({512: 16, 2048: 8})
        self.save()

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
            "optimisers": self.optimisers.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        part = self.folder / "state.part"
        torch.save(state, part)
        part.replace(self.folder / "state.pt")

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimisers.load_state_dict(state["optimisers"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def _train(self, batch: Batch, phase: Phase, learn: Replayed) -> None:
        """One step. The vision tower, whose images differ in number and size, is not recorded."""
        rate = self.settings.rate(self.progress)
        batch = batch.to(self.device)
        images = self.network.image_rows(batch)
        losses = dict(learn({**batch.tensors, "images": images.detach()}))
        torch.autograd.backward(images, losses.pop("images"))
        losses |= self._update({"rate": torch.full((), rate, device=self.device)})
        self.step += 1
        self._note(losses, phase, batch, rate)

    def _learned(self, tensors: Tensors, *, all_dense: bool) -> Tensors:
        """Gradients of everything but the vision tower; the losses and the images' gradient."""
        values = dict(tensors)
        images = values.pop("images").detach().requires_grad_()
        batch = Batch.of(values)
        self.optimisers.zero()
        context = Context(self.assets.config, batch, all_dense=all_dense)
        losses = _losses(self.network(context, images=images), batch)
        selection = selection_loss(context)
        (losses["loss"] + self.settings.selection_weight * selection).backward()
        assert images.grad is not None
        losses |= {"selection": selection, "images": images.grad}
        return {name: value.detach() for name, value in losses.items()}

    def _updated(self, tensors: Tensors) -> Tensors:
        """One step of the optimisers."""
        rate = tensors["rate"]
        norms = self.optimisers.step(rate)
        for gate in self.gates:
            gate.balance(self.settings.balance_rate * rate)
        return norms

    def _peak(self) -> dict[str, float]:
        """Most device memory used since the last call, GiB."""
        if self.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return {"peak_gib": peak}

    def _note(self, values: dict[str, Tensor], phase: Phase, batch: Batch, rate: float) -> None:
        for name, value in values.items():
            self._averages[name] = value.clone() if self._averaged == 0 else self._averages[name] + value
        self._averaged += 1
        if self._averaged < self.settings.log_every:
            return
        means = {name: float(value) / self._averaged for name, value in self._averages.items()}
        self._averaged = 0
        waited, self._waited_s = self._waited_s, 0.0
        self.log(
            {
                "step": self.step,
                "elapsed_s": self.elapsed_s,
                "phase": phase.name,
                "tokens": batch.ids.numel(),
                "rate": rate,
                "waited_s": waited,
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
