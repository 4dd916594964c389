"""The small model that comes with the package: within its size, and it answers."""

from __future__ import annotations

import pytest
from cedar.model.network import Network
from cedar.model.plan import inspect_checkpoint
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from cedar.training.assets import make_assets
from cedar.training.evaluate import recall_cases, run_case, task_cases
from cedar.training.serving import WAYS, built_in_model, load
from cedar.training.tokenization import CHAT_TEMPLATE, WordEncoder

FOLDER = built_in_model()


@pytest.fixture(scope="module")
def network() -> Network:
    return load(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Storage(str(FOLDER)))


def test_size_and_layout() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000
    inspection = inspect_checkpoint(str(FOLDER))
    assert not inspection.problems
    assert not inspection.unexpected


def test_tokenizer_and_template_are_what_the_program_makes(tokenizer: Tokenizer) -> None:
    made = make_assets(narrow=False, seed=0)
    assert made.tokenizer.get_vocab() == tokenizer.backend.get_vocab()
    assert (FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_it_finds_a_fact_in_filler_cold_and_after_a_hit(network: Network, tokenizer: Tokenizer) -> None:
    encode = WordEncoder(tokenizer.backend)
    case = next(iter(recall_cases(512, 1, encode.measure)))
    assert all(run_case(network, tokenizer, case, way) for way in WAYS if way.pool)


def test_it_adds_and_reads_a_digit(network: Network, tokenizer: Tokenizer) -> None:
    encode = WordEncoder(tokenizer.backend)
    cases = {case.task.split(",")[0]: case for case in task_cases(1, 0, encode.measure)}
    assert run_case(network, tokenizer, cases["sum"], WAYS[0])
    assert run_case(network, tokenizer, cases["digit"], WAYS[0])
