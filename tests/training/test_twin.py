"""The differentiable network gives the served network's numbers: bit for bit on the CPU.

Both sides quantise, round and accumulate in the same places. An accelerator runs the same code with fp32
accumulation and bf16 products; there selections differ at ties, so only the CPU is held to equality.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cedar.model import load_network
from cedar.model.network import Network
from cedar.training.assets import Assets
from cedar.training.batches import BatchShape, collate
from cedar.training.context import Batch, Context, Loaded
from cedar.training.conversations import Mixture, training_conversation
from cedar.training.draft import DraftStages
from cedar.training.export import export_checkpoint
from cedar.training.image_tasks import digit_turn, figure_turn
from cedar.training.indexer import selection_loss
from cedar.training.network import TrainingNetwork
from cedar.training.restore import restored_network
from cedar.training.tokenization import Encoded, WordEncoder, encode_conversation, span_measure

TOKENS = 144  # nine windows of the narrow model


@pytest.fixture(scope="module")
def twin(narrow: Assets) -> TrainingNetwork:
    torch.manual_seed(5)
    network = TrainingNetwork(narrow.config, narrow.compressed)
    with torch.no_grad():  # away from the even start, so that a swapped norm or sink would show
        for name, param in network.named_parameters():
            if "norm" in name or "sink" in name or "bias" in name:
                param += 0.3 * torch.randn_like(param)
    return network


@pytest.fixture(scope="module")
def folder(narrow: Assets, twin: TrainingNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("twin")
    weights = dict(twin.state_dict()) | DraftStages(narrow.config).state_dict()
    export_checkpoint(path, narrow.published, weights, narrow.tokenizer)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Network:
    return load_network(folder)


def conversation(assets: Assets, images: float) -> Encoded:
    encode = WordEncoder(assets.tokenizer)
    mixture = Mixture(facts=2, images=images, text=0.3, reserve=0.7)
    span = span_measure(assets.config.vision)
    turns = training_conversation(random.Random(11), TOKENS + 60, encode.measure, mixture, span)
    return encode_conversation(turns, encode, span)


def batch_of(assets: Assets, item: Encoded, starts: tuple[int, int] = (0, 0)) -> Batch:
    shape = BatchShape(rows=1, tokens=TOKENS, sparse=1.0, replay=0.0, queries=16)
    batch = collate([item], shape, assets.config, random.Random(0))
    encoder, decoder = (torch.tensor([start]) for start in starts)
    return replace(batch, encoder_start=encoder, decoder_start=decoder)


@torch.no_grad()
def test_every_logit_of_a_text_prompt(narrow: Assets, twin: TrainingNetwork, served: Network) -> None:
    batch = batch_of(narrow, conversation(narrow, 0.0))
    mine = twin(Context(narrow.config, batch))[0]
    theirs = served.logits(batch.ids[0].tolist(), replay=False)
    assert torch.equal(mine, theirs)


@torch.no_grad()
def test_the_last_logits_after_decoder_replay(narrow: Assets, twin: TrainingNetwork, served: Network) -> None:
    start = TOKENS - narrow.config.window
    batch = batch_of(narrow, conversation(narrow, 0.0), (0, start))
    mine = twin(Context(narrow.config, batch))[0, -1]
    theirs = served.logits(batch.ids[0].tolist(), replay=True)[0]
    assert torch.equal(mine, theirs)
    full = twin(Context(narrow.config, batch_of(narrow, conversation(narrow, 0.0))))[0, -1]
    assert not torch.equal(full, theirs)


@torch.no_grad()
@pytest.mark.parametrize("size", [(84, 84), (98, 84), (84, 300), (500, 310)])
def test_image_rows_of_any_size(
    narrow: Assets, twin: TrainingNetwork, served: Network, size: tuple[int, int]
) -> None:
    encode, span = WordEncoder(narrow.tokenizer), span_measure(narrow.config.vision)
    turns = [digit_turn(random.Random(1)), figure_turn(random.Random(2), size=size)]
    item = encode_conversation(turns, encode, span)
    rows = twin.image_rows(batch_of(narrow, item))
    for start, image in zip(item.spans, item.images, strict=True):
        theirs = served.encode_image(served.prepare(image))
        mine = rows[start : start + span(image)]
        assert (mine.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()


@torch.no_grad()
def test_a_stored_checkpoint_comes_back_as_the_network_that_wrote_it(
    narrow: Assets, twin: TrainingNetwork, folder: Path
) -> None:
    batch = batch_of(narrow, conversation(narrow, 0.5))
    again = restored_network(folder, torch.device("cpu"))
    assert torch.equal(again(Context(narrow.config, batch)), twin(Context(narrow.config, batch)))


@torch.no_grad()
def test_pages_below_a_hit_are_read_as_they_were_written(narrow: Assets, twin: TrainingNetwork) -> None:
    """After a replay that starts inside the prompt only entries above the hit may change."""
    item = conversation(narrow, 0.0)
    width = narrow.config.window
    cold = Context(narrow.config, batch_of(narrow, item))
    before = twin(cold)
    hit = torch.tensor([4 * width])
    warm = Context(
        narrow.config,
        batch_of(narrow, item, (3 * width, 0)),
        loaded=Loaded(hit=hit, written=cold.written),
    )
    after = twin(warm)
    for plan_ratio, (mine, theirs) in zip(
        (2, 2, 1), zip(warm.written, cold.written, strict=True), strict=True
    ):
        below = 4 * width // plan_ratio
        assert torch.equal(mine[0][:, :below], theirs[0][:, :below])
        assert torch.equal(mine[1][:, :below], theirs[1][:, :below])
        assert not torch.equal(mine[0], theirs[0])
    assert torch.equal(before[:, : 3 * width], after[:, : 3 * width])
    assert not torch.equal(before, after)


@torch.no_grad()
def test_unpacked_entries_are_near_packed_ones_and_not_equal(narrow: Assets, twin: TrainingNetwork) -> None:
    batch = batch_of(narrow, conversation(narrow, 0.0))
    packed, unpacked = (Context(narrow.config, batch, packed=packed) for packed in (True, False))
    twin(packed)
    twin(unpacked)
    for mine, theirs in zip(packed.written, unpacked.written, strict=True):
        difference = (mine[0].float() - theirs[0].float()).norm() / theirs[0].float().norm()
        assert 0.01 < difference < 0.5


def test_every_weight_learns_and_selection_teaches_only_the_indexer(
    narrow: Assets, twin: TrainingNetwork
) -> None:
    batch = batch_of(narrow, conversation(narrow, 0.5))
    context = Context(narrow.config, batch)
    loss = twin(context).logsumexp(-1).mean() + selection_loss(context)
    loss.backward()
    still = [
        n for n, p in twin.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert not still
    twin.zero_grad()
    context = Context(narrow.config, batch)
    twin(context)
    selection_loss(context).backward()
    moved = {n for n, p in twin.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved
    assert all(".indexer." in name for name in moved)
    twin.zero_grad()
