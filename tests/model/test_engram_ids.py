"""The id map, multipliers and primes of Engram against published vectors and golden hashes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cedar.model.config import parse_config
from cedar.model.engram_ids import compressed_ids, hash_plans, text_normaliser
from cedar.model.prompt_errors import EngramTableError
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
CONFIG = parse_config((GOLDEN / "config.json").read_bytes())
BACKEND = Tokenizer.load(Storage(str(GOLDEN))).backend
FLASH = {
    "layer_ids": [1, 14],
    "vocab_size": 16_000_000,
    "compressed_vocab_size": 99_092,
    "max_ngram_size": 4,
    "heads": 8,
}
TINY = {
    "layer_ids": CONFIG.engram.layer_ids,
    "vocab_size": CONFIG.engram.vocab_size,
    "compressed_vocab_size": CONFIG.engram.compressed_vocab_size,
    "max_ngram_size": CONFIG.engram.max_ngram_size,
    "heads": CONFIG.engram.heads,
}


def test_published_multipliers_and_primes():
    first, second = hash_plans(**FLASH, num_embeddings=[384_006_168, 384_016_682])
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert (first.moduli[0], first.moduli[-1]) == (16000057, 16000463)
    assert (second.moduli[0], second.moduli[-1]) == (16000477, 16000889)


def test_products_stay_below_the_sign_bit():
    for plan in hash_plans(**FLASH):
        assert max(plan.multipliers) * (FLASH["compressed_vocab_size"] - 1) < 2**63


def test_primes_are_distinct_primes_and_offsets_their_running_sum():
    plans = hash_plans(**TINY)
    moduli = [p for plan in plans for p in plan.moduli]
    assert len(set(moduli)) == len(moduli)
    assert all(p > 60 and all(p % d for d in range(2, p)) for p in moduli)
    for plan in plans:
        assert plan.offsets == tuple(np.cumsum((0, *plan.moduli[:-1])))
        assert plan.rows == sum(plan.moduli)


def test_rows_that_contradict_the_config_are_named():
    with pytest.raises(EngramTableError, match=r"engram_num_embeddings=\[434, 607\].*\[434, 606\]"):
        hash_plans(**TINY, num_embeddings=[434, 607])


@pytest.mark.parametrize("prompt", ["text", "image"])
def test_golden_hashes(prompt):
    expected = load_file(GOLDEN / "expected.safetensors")
    ids = expected[f"{prompt}/input_ids"][0].numpy()
    is_image = ids == CONFIG.image_token_id
    mapping = compressed_ids(BACKEND, vocab_size=640, compressed_vocab_size=512)
    windows = look_back(mapping[ids], is_image, int(mapping[CONFIG.engram.pad_token_id]))
    for plan in hash_plans(**TINY, num_embeddings=CONFIG.engram.num_embeddings):
        mixed = np.bitwise_xor.accumulate(windows * np.array(plan.multipliers), axis=1)
        moduli = np.array(plan.primes)
        rows = (mixed[:, 1:, None] % moduli[None]).reshape(len(ids), -1) + np.array(plan.offsets)
        assert np.array_equal(rows, expected[f"{prompt}/layer{plan.layer:02d}.engram_hash"][0].numpy())


def look_back(tokens: np.ndarray, is_image: np.ndarray, pad: int) -> np.ndarray:
    """`[T, 4]` compressed ids: a position and the three before it, pad from where look-back stops."""
    windows = np.full((len(tokens), 4), pad)
    for i in range(len(tokens)):
        for k in range(min(i + 1, 4)):
            if is_image[i - k]:
                break
            windows[i, k] = tokens[i - k]
    return windows


def test_the_map_is_numbered_as_first_seen():
    mapping = compressed_ids(BACKEND, vocab_size=640, compressed_vocab_size=512)
    firsts = mapping[np.sort(np.unique(mapping, return_index=True)[1])]
    assert np.array_equal(firsts, np.arange(512))


def test_words_that_differ_in_case_or_space_share_an_id():
    mapping = compressed_ids(BACKEND, vocab_size=640, compressed_vocab_size=512)
    ids = BACKEND.get_vocab()
    assert mapping[ids["You"]] == mapping[ids["you"]] == mapping[ids["ĠYou"]]
    assert mapping[ids["Ġ"]] == mapping[ids["ĠĠĠĠ"]] == mapping[ids["Ċ"]]


@pytest.mark.parametrize(
    ("text", "key"),
    [("  É\tb ", "e b"), (" ", " "), ("\n\t", " "), ("ﬁ", "fi"), ("", ""), ("\u0301", "")],
)
def test_normaliser(text, key):
    assert text_normaliser().normalize_str(text) == key


def test_a_map_of_the_wrong_size_is_refused():
    with pytest.raises(EngramTableError, match=r"engram_compressed_vocab_size=511.*512"):
        compressed_ids(BACKEND, vocab_size=640, compressed_vocab_size=511)


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(EngramTableError, match=r"vocab_size=639.*639"):
        compressed_ids(BACKEND, vocab_size=639, compressed_vocab_size=512)


def test_ids_above_the_tokenizer_are_covered():
    mapping = compressed_ids(BACKEND, vocab_size=700, compressed_vocab_size=512)
    assert mapping.shape == (700,)
    assert not mapping[640:].any()
