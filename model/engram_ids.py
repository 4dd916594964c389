"""What Engram hashing needs before any tensor: compressed ids, multipliers and primes (spec §7, §13, §14).

Everything here is a pure function of `tokenizer.json` and the config's integers. The hash itself and the row
gather belong to `engram.py`, which reads `EngramHashPlan` and the `compressed_ids` array.

Letters: V token ids, C compressed ids, N = `engram_max_ngram_size`, H = `engram_n_heads` tables per n-gram
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cedar.model.prompt_errors import EngramTableError
from tokenizers import Regex, Tokenizer, normalizers

IntArray = npt.NDArray[np.int64]

_LAYER_SEED = 10007
_INT64_MAX = 2**63 - 1
_LONE_SPACE = "\ue000"  # stands in for a text that is one space, which the strip would otherwise erase
_DECODE_CHUNK = 8192


@dataclass(frozen=True, kw_only=True)
class EngramHashPlan:
    """How one layer turns n-grams of compressed ids into table rows.

    `multipliers` has N entries, token t-k is multiplied by `multipliers[k]`; `primes[n - 2][h]` is the
    modulus of head h of n-gram size n.
    """

    layer: int
    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]

    @property
    def moduli(self) -> tuple[int, ...]:
        """The primes n-gram major, `[(N - 1)·H]`: the order of the hash's columns."""
        return tuple(prime for row in self.primes for prime in row)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First table row of each column, `[(N - 1)·H]`: the running sum of `moduli`."""
        offsets, total = [], 0
        for prime in self.moduli:
            offsets.append(total)
            total += prime
        return tuple(offsets)

    @property
    def rows(self) -> int:
        """Rows of this layer's table, to be equal to the layer's `engram_num_embeddings`."""
        return sum(self.moduli)


def hash_plans(
    *,
    layer_ids: Sequence[int],
    vocab_size: int,
    compressed_vocab_size: int,
    max_ngram_size: int,
    heads: int,
    num_embeddings: Sequence[int] | None = None,
) -> tuple[EngramHashPlan, ...]:
    """The plan of every Engram layer, in the order of `layer_ids` (primes are never used twice).

    `vocab_size` is `engram_vocab_size`, where the prime search of each n-gram size starts. With
    `num_embeddings` given, each layer's rows are checked against it. Raises `EngramTableError`.
    """
    taken: set[int] = set()
    plans = []
    for layer in layer_ids:
        primes = tuple(
            _unused_primes(heads, above=vocab_size - 1, taken=taken) for _ in range(2, max_ngram_size + 1)
        )
        multipliers = hash_multipliers(layer, compressed_vocab_size, max_ngram_size)
        plans.append(EngramHashPlan(layer=layer, multipliers=multipliers, primes=primes))
    if num_embeddings is not None:
        rows = [plan.rows for plan in plans]
        if list(num_embeddings) != rows:
            allowed = f"{rows}, the sums of the primes above engram_vocab_size = {vocab_size}"
            raise EngramTableError("engram_num_embeddings", list(num_embeddings), allowed)
    return tuple(plans)


def hash_multipliers(layer: int, compressed_vocab_size: int, count: int) -> tuple[int, ...]:
    """`count` odd multipliers of a layer, each small enough that id times multiplier stays below 2^63."""
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    draws = np.random.default_rng(_LAYER_SEED * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def compressed_ids(tokenizer: Tokenizer, *, vocab_size: int, compressed_vocab_size: int) -> IntArray:
    """The map from token id to compressed id, `[V]` int64.

    Ids that normalise to the same text share a compressed id, numbered as first seen. Ids of `[0,
    vocab_size)` above the tokenizer's last token have no text; they can only come from a caller and map to
    compressed id 0. Raises `EngramTableError` when the number of distinct ids is not
    `compressed_vocab_size`, or when the tokenizer has ids the model has no embedding for.
    """
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    known = max(tokens.values(), default=-1) + 1
    if known > vocab_size:
        raise EngramTableError("vocab_size", vocab_size, f"above the tokenizer's last id, {known - 1}")
    raw = {token_id: token for token, token_id in tokens.items()}
    normaliser = text_normaliser()
    mapping = np.zeros(vocab_size, dtype=np.int64)
    seen: dict[str, int] = {}
    for start in range(0, known, _DECODE_CHUNK):
        ids = range(start, min(start + _DECODE_CHUNK, known))
        texts = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
        for token_id, text in zip(ids, texts, strict=True):
            if "\ufffd" in text:
                key = raw[token_id]
            else:
                key = normaliser.normalize_str(text) or text
            mapping[token_id] = seen.setdefault(key, len(seen))
    if len(seen) != compressed_vocab_size:
        allowed = f"{len(seen)}, the number of distinct ids that this tokenizer gives"
        raise EngramTableError("engram_compressed_vocab_size", compressed_vocab_size, allowed)
    return mapping


def text_normaliser() -> normalizers.Normalizer:
    """The normaliser that decides which tokens Engram takes as the same word."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _unused_primes(count: int, *, above: int, taken: set[int]) -> tuple[int, ...]:
    found: list[int] = []
    candidate = above
    while len(found) < count:
        candidate += 1
        if candidate not in taken and _is_prime(candidate):
            taken.add(candidate)
            found.append(candidate)
    return tuple(found)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True
