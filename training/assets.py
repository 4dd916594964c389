"""What a run starts from: the tokenizer, the config, the Engram id map. A pure function of the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
from cedar.model.config import ModelConfig
from cedar.model.engram_ids import compressed_ids
from cedar.model.prompt_errors import EngramTableError
from cedar.training.checkpoint_config import VOCAB_SIZE, published_config, shrunk_config, typed
from cedar.training.tokenization import CORPUS_ROUNDS, train_tokenizer
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Assets:
    """Tokenizer and config of one model."""

    tokenizer: tokenizers.Tokenizer
    published: dict[str, Any]
    config: ModelConfig
    compressed: Tensor  # int64 [V]


def make_assets(*, narrow: bool, seed: int) -> Assets:
    """Train the tokenizer and write the config that fits it; `narrow` for smoke runs."""
    tokenizer = train_tokenizer(seed, 400 if narrow else CORPUS_ROUNDS)
    count = distinct_ids(tokenizer)
    published = published_config(count)
    if narrow:
        published = shrunk_config(published)
    mapping = compressed_ids(tokenizer, vocab_size=VOCAB_SIZE, compressed_vocab_size=count)
    return Assets(
        tokenizer=tokenizer,
        published=published,
        config=typed(published),
        compressed=torch.from_numpy(mapping.astype(np.int64)),
    )


def distinct_ids(tokenizer: tokenizers.Tokenizer) -> int:
    """How many Engram ids the tokenizer gives, which is what the config has to say."""
    try:
        compressed_ids(tokenizer, vocab_size=VOCAB_SIZE, compressed_vocab_size=0)
    except EngramTableError as error:
        return int(str(error.allowed).split(",")[0])
    raise AssertionError("a tokenizer without tokens")
