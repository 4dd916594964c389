"""The differentiable network gives the served network's numbers: bit for bit on the CPU.

Both sides quantise, round and accumulate in the same places. An accelerator runs the same code with fp32
accumulation and bf16 products; there selections differ at ties, so only the CPU is held to equality.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cedar.model import load_network
from cedar.model.network import Network
from cedar.training.assets import Assets
from cedar.training.batches import BatchShape, collate
from cedar.training.context import Batch, Context
from cedar.training.conversations import Mixture, training_conversation
from cedar.training.draft import DraftStages
from cedar.training.export import export_checkpoint
from cedar.training.indexer import selection_loss
from cedar.training.network import TrainingNetwork
from cedar.training.tokenization import Encoded, WordEncoder, encode_conversation

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
def served(narrow: Assets, twin: TrainingNetwork, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder: Path = tmp_path_factory.mktemp("twin")
    weights = dict(twin.state_dict()) | DraftStages(narrow.config).state_dict()
    export_checkpoint(folder, narrow.published, weights, narrow.tokenizer)
    return load_network(folder)


def conversation(assets: Assets, images: float) -> Encoded:
    encode = WordEncoder(assets.tokenizer)
    mixture = Mixture(facts=2, images=images, text=0.3, reserve=0.7)
    turns = training_conversation(random.Random(11), TOKENS + 60, encode.measure, mixture, 8)
    return encode_conversation(turns, encode, 8)


def batch_of(assets: Assets, item: Encoded, starts: tuple[int, int] = (0, 0)) -> Batch:
    shape = BatchShape(rows=1, tokens=TOKENS, sparse=1.0, replay=0.0, queries=16)
    batch = collate([item], shape, assets.config, random.Random(0))
    values = dict(batch.__dict__)
    values |= {"encoder_start": torch.tensor(starts[:1]), "decoder_start": torch.tensor(starts[1:])}
    return Batch(**values)


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
def test_image_rows(narrow: Assets, twin: TrainingNetwork, served: Network) -> None:
    item = conversation(narrow, 0.9)
    assert item.images
    prepared = served.prepare(item.images[0])
    theirs = served.encode_image(prepared)
    mine = twin.image_rows(prepared.patches.flatten(1).unsqueeze(0))[0]
    assert (mine.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()


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
