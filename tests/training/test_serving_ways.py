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
from cedar.training.eval_options import counts
from cedar.training.evaluate import evaluate
from cedar.training.export import export_checkpoint
from cedar.training.image_tasks import IMAGE_TURNS
from cedar.training.network import TrainingNetwork
from cedar.training.rows import Row, interval
from cedar.training.serving import SERVED_WAYS, WAYS, Way, answer, load, prompt_of, respond
from cedar.training.text_tasks import TEXT_TURNS
from cedar.training.tokenization import WordEncoder, encode_conversation, span_measure


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
    return load(folder, drafting=True)


def answers(network: Network, assets: Assets, way: Way) -> list[int]:
    encode = WordEncoder(assets.tokenizer)
    turns = recall_conversation(random.Random(4), 150, 2, 1, encode.measure)
    encoded = encode_conversation(turns, encode, span_measure(assets.config.vision))
    return answer(network, prompt_of(network, encoded, len(encoded.ids) - 12), way, 6)


def test_every_way_answers(narrow: Assets, network: Network) -> None:
    for way in SERVED_WAYS:
        assert 1 <= len(answers(network, narrow, way)) <= 6


@pytest.mark.parametrize("fields", [{"record": True}, {"exact": True}, {"exact": True, "drafting": True}])
def test_exact_ways_give_the_cold_answer(narrow: Assets, network: Network, fields: dict[str, bool]) -> None:
    cold = answers(network, narrow, Way(name="cold"))
    assert answers(network, narrow, Way(name="hit", hit=0.5, **fields)) == cold


def test_answers_together_are_answers_alone(narrow: Assets, network: Network) -> None:
    encode, span = WordEncoder(narrow.tokenizer), span_measure(narrow.config.vision)
    prompts = []
    for seed, length in ((1, 60), (2, 150), (3, 90)):
        turns = recall_conversation(random.Random(seed), length, 1, 1, encode.measure)
        item = encode_conversation(turns, encode, span)
        prompts.append(prompt_of(network, item, len(item.ids) - 12))
    limits = [3, 1, 4]
    for way in (Way(name="hit", hit=0.5), Way(name="drafting", drafting=True)):
        together = respond(network, prompts, way, limits)
        alone = [answer(network, p, way, limit) for p, limit in zip(prompts, limits, strict=True)]
        assert [a.ids for a in together] == alone
        assert all(len(a.ids) == limit for a, limit in zip(together, limits, strict=True))
        assert [a.steps > 0 for a in together] == [way.drafting, False, way.drafting]


def test_without_the_pool_is_another_network(folder: Path, network: Network) -> None:
    without = load(folder, pool=False)
    assert any(plan.uses_candidates for plan in network.plan)
    assert not any(plan.uses_candidates for plan in without.plan)


def test_every_task_is_asked_in_every_wanted_way(folder: Path) -> None:
    rows = list(evaluate(folder, {}, 1, WAYS[:1], openings=(0,)))
    assert len(rows) == len(set(TEXT_TURNS)) + 2 * len(set(IMAGE_TURNS))
    ways = [way for way in SERVED_WAYS if way.name.startswith(("cold, b", "hit at 9/10"))]
    rows = list(evaluate(folder, {160: 2}, 0, ways))
    drafted = [row for row in rows if row.way.endswith("drafting")]
    assert len(rows) == 3
    assert {row.way for row in rows if row.task.startswith("recall")} == {way.name for way in ways}
    assert all(0 <= row.right <= row.asked for row in rows)
    assert {row.differing for row in drafted} == {0}
    assert all(row.told == row.steps + row.accepted for row in drafted)
    short = list(evaluate(folder, {110: 1}, 0, [Way(name="hit at 1/10", hit=0.1), WAYS[0]]))
    assert [row.way for row in short] == [WAYS[0].name], "a tenth of it is no whole page"


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"), [(6, 6, 61.0, 100.0), (0, 8, 0.0, 32.4), (50, 100, 40.4, 59.6)]
)
def test_intervals(right: int, asked: int, low: float, high: float) -> None:
    assert [round(100 * edge, 1) for edge in interval(right, asked)] == [low, high]


def test_what_a_row_says() -> None:
    row = Row(task="sum", way="w", right=3, asked=4, differing=0, steps=10, told=25, proposed=40, accepted=15)
    for text in (
        "3 / 4 ",
        "75.0 %",
        "[ 30.1,  95.4]",
        "2.50 tokens a step, 15 of 40 accepted, 0 answers differ",
    ):
        assert text in row.line()
    assert row.record()["tokens_a_step"] == 2.5
    assert "step" not in Row(task="sum", way="w", right=3, asked=4).line()


@pytest.mark.parametrize("item", ["512", "512:0", "x:4", "50:4", "512:-1"])
def test_wrong_counts_are_named(item: str) -> None:
    with pytest.raises(ValueError, match=f"--recall {item}"):
        counts([item])
