"""Ways of serving one prompt, on random weights: equal where they must be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cedar.model.network import Network
from cedar.training.assets import Assets
from cedar.training.conversations import recall_conversation
from cedar.training.draft import DraftStages
from cedar.training.evaluate import evaluate
from cedar.training.export import export_checkpoint
from cedar.training.network import TrainingNetwork
from cedar.training.serving import WAYS, Way, answer, load, prompt_of
from cedar.training.tokenization import WordEncoder, encode_conversation


@pytest.fixture(scope="module")
def folder(narrow: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    path: Path = tmp_path_factory.mktemp("ways")
    weights = dict(TrainingNetwork(narrow.config, narrow.compressed).state_dict())
    weights |= DraftStages(narrow.config).state_dict()
    export_checkpoint(path, narrow.published, weights, narrow.tokenizer)
    return path


@pytest.fixture(scope="module")
def network(folder: Path) -> Network:
    return load(folder)


def answers(network: Network, assets: Assets, way: Way) -> list[int]:
    encode = WordEncoder(assets.tokenizer)
    turns = recall_conversation(random.Random(4), 150, 2, 1, encode.measure)
    encoded = encode_conversation(turns, encode, 8)
    return answer(network, prompt_of(network, encoded, len(encoded.ids) - 12), way, 6)


def test_every_way_answers(narrow: Assets, network: Network) -> None:
    for way in WAYS:
        assert 1 <= len(answers(network, narrow, way)) <= 6


def test_a_hit_with_its_record_is_the_cold_answer(narrow: Assets, network: Network) -> None:
    cold = answers(network, narrow, Way(name="cold"))
    assert answers(network, narrow, Way(name="hit", hit=0.5, record=True)) == cold


def test_without_the_pool_is_another_network(folder: Path, network: Network) -> None:
    without = load(folder, pool=False)
    assert any(plan.uses_candidates for plan in network.plan)
    assert not any(plan.uses_candidates for plan in without.plan)


def test_every_task_is_asked_in_every_wanted_way(folder: Path) -> None:
    rows = list(evaluate(folder, {160: 2}, 1, WAYS[:2]))
    assert len(rows) == 2 * 8 + 2
    assert {way for task, way, _, _ in rows if task.startswith("recall")} == {way.name for way in WAYS[:2]}
    assert all(0 <= right <= asked for _, _, right, asked in rows)
