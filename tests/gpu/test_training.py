"""Training on a CUDA device: a recorded step is the step, and the network scores as on the CPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from cedar.training.assets import make_assets
from cedar.training.batches import Feed
from cedar.training.context import Context
from cedar.training.replayed import Replayed, Tensors
from cedar.training.settings import smoke_settings
from cedar.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Eager(Replayed):
    """Calls the function every time."""

    def __call__(self, inputs: Tensors) -> Tensors:
        return self._function(inputs)


@pytest.mark.parametrize("sparse", [False, True])
def test_recorded_steps_learn_what_eager_steps_learn(tmp_path: Path, sparse: bool) -> None:
    assets = make_assets(narrow=True, seed=0)
    settings = smoke_settings(8)
    phase = settings.phases[sparse]
    feed = Feed(assets.tokenizer, assets.config, [phase.shape], seed=3, workers=0)
    batches = [feed.next(0) for _ in range(8)]
    losses: list[list[float]] = []
    for kind in (Eager, Replayed):
        torch.manual_seed(1)
        trainer = Trainer(assets, settings, tmp_path, torch.device("cuda"))
        trainer._update = kind(trainer._updated)
        learn = kind(partial(trainer._learned, all_dense=phase.all_dense))
        with torch.cuda.stream(trainer.stream):
            for batch in batches:
                trainer._train(batch, phase, learn)
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        losses.append([float(line.split('"loss": ')[1].split(",")[0]) for line in lines])
    eager, recorded = losses
    assert len(eager) == len(recorded) == 8
    assert eager[-1] < eager[0]
    for mine, theirs in zip(recorded, eager, strict=True):
        assert abs(mine - theirs) < 0.02 * theirs


def test_a_run_goes_through_every_phase_recorded(tmp_path: Path) -> None:
    """An update recorded in one phase reads what later phases' recordings write."""
    assets = make_assets(narrow=True, seed=0)
    trainer = Trainer(assets, smoke_settings(16), tmp_path, torch.device("cuda"))
    trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 16
    assert losses[-1] < losses[0]
    assert all(gate.load.sum() > 0 for gate in trainer.gates)


@torch.no_grad()
def test_logits_near_those_of_the_cpu(tmp_path: Path) -> None:
    assets = make_assets(narrow=True, seed=0)
    torch.manual_seed(1)
    trainer = Trainer(assets, smoke_settings(1), tmp_path, torch.device("cpu"))
    shape = trainer.settings.phases[1].shape
    batch = Feed(assets.tokenizer, assets.config, [shape], seed=3, workers=0).next(0)
    assert batch.pictures
    there = trainer.network(Context(assets.config, batch, all_dense=True))
    cuda = torch.device("cuda")
    here = trainer.network.to(cuda)(Context(assets.config, batch.to(cuda), all_dense=True)).cpu()
    assert (here - there).norm() < 0.2 * there.norm()  # rounding flips choices of experts
