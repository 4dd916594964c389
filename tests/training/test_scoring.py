"""Many questions a forward: what is judged right, and the ways in which they are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cedar.training.assets import Assets
from cedar.training.cases import Case, recall_cases, task_cases
from cedar.training.context import Batch, Context
from cedar.training.network import TrainingNetwork
from cedar.training.scoring import answers, judge, rows
from cedar.training.tokenization import WordEncoder, encode_conversation, span_measure
from cedar.training.ways import UNPACKED, WAYS, Way
from torch import Tensor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network(narrow: Assets) -> TrainingNetwork:
    torch.manual_seed(3)
    return TrainingNetwork(narrow.config, narrow.compressed)


def teach(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Batch], Tensor]) -> list[Context]:
    """Replace the network's forward by one that says every next token, but where `wrong` is true."""
    seen: list[Context] = []

    def forward(self: TrainingNetwork, context: Context) -> Tensor:
        seen.append(context)
        ids = torch.roll(context.batch.ids, -1, 1)
        ids = torch.where(wrong(context.batch), 7, ids)
        empty = torch.zeros(2, context.tokens)
        context.written = [(empty, empty)]
        return torch.nn.functional.one_hot(ids, self.config.vocab_size).float()

    monkeypatch.setattr(TrainingNetwork, "forward", forward)
    return seen


def test_an_answer_is_right_to_its_last_token(
    narrow: Assets, network: TrainingNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = WordEncoder(narrow.tokenizer).measure
    cases = [*task_cases(2, 0, measure), *recall_cases(100, 3, measure)]
    seen = teach(monkeypatch, lambda batch: torch.zeros_like(batch.ids, dtype=torch.bool))
    (rights,) = judge(network, narrow.tokenizer, cases, WAYS[:1], CPU)
    assert all(rights)
    assert sum(context.rows for context in seen) == len(cases)
    teach(monkeypatch, lambda batch: torch.roll(batch.ids, -1, 1) == 1)  # never says the end token
    (rights,) = judge(network, narrow.tokenizer, cases, WAYS[:1], CPU)
    assert not any(rights)


def test_only_the_last_answer_counts(
    narrow: Assets, network: TrainingNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, span = WordEncoder(narrow.tokenizer), span_measure(narrow.config.vision)
    case = list(recall_cases(150, 2, encode.measure))[1]
    assert len(case.turns) > 1
    item = encode_conversation(case.turns, encode, span)
    last = answers(item.ids, item.answer)[-1][0]
    teach(monkeypatch, lambda batch: (torch.arange(batch.ids.shape[1]) < last - 1).expand_as(batch.ids))
    assert judge(network, narrow.tokenizer, [case], WAYS[:1], CPU) == [[True]]


def test_ways_are_how_the_forward_differs(
    narrow: Assets, network: TrainingNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, span = WordEncoder(narrow.tokenizer), span_measure(narrow.config.vision)
    case = Case("recall", next(iter(recall_cases(150, 1, encode.measure))).turns)
    item = encode_conversation(case.turns, encode, span)
    prompt, window = answers(item.ids, item.answer)[-1][0], narrow.config.window
    seen = teach(monkeypatch, lambda batch: torch.zeros_like(batch.ids, dtype=torch.bool))

    def asked(way: Way) -> Context:
        seen.clear()
        judge(network, narrow.tokenizer, [case], [way], CPU)
        return seen[-1]

    cold = asked(WAYS[0])
    assert cold.batch.decoder_start.tolist() == [prompt - window]
    assert cold.batch.encoder_start.tolist() == [0]
    assert (cold.pool, cold.packed, cold.loaded) == (True, True, None)
    assert asked(replace(WAYS[0], replay=False)).batch.decoder_start.tolist() == [0]
    assert not asked(replace(WAYS[0], pool=False)).pool
    assert not asked(UNPACKED).packed
    hit = prompt // 2 // (2 * window) * (2 * window)
    warm = asked(replace(WAYS[0], hit=0.5))
    assert warm.loaded is not None
    assert warm.loaded.hit.tolist() == [hit]
    assert warm.batch.encoder_start.tolist() == [hit - window]
    assert asked(replace(WAYS[0], hit=0.5, record=True)).loaded is None


def test_rows_count_by_task_and_way(narrow: Assets, network: TrainingNetwork) -> None:
    cases = [*task_cases(1, 0, WordEncoder(narrow.tokenizer).measure)][:2]
    got = list(rows(network, narrow.tokenizer, cases, WAYS[:2], CPU))
    assert [(task, way) for task, way, _, _ in got] == [
        (case.task, way.name) for case in cases for way in WAYS[:2]
    ]
    assert all(asked == 1 and right in (0, 1) for _, _, right, asked in got)
