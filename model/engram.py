"""Engram: n-gram hash rows, the tables on the host, and what a layer adds to its streams (spec §7, §14).

Row addresses depend on token ids alone, so a step computes them for all its Engram layers before the first
layer runs. Tables stay on the host (mapped from disk where the checkpoint is local); only gathered rows reach
the device.

Letters: N rows of a step, G n-gram size, C columns = (G - 1) x heads, E channels of a table row, hc streams,
d hidden.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from cedar.kernels.engram_gate import engram_gate
from cedar.kernels.fp8 import dequantize_fp8
from cedar.model.config import EngramConfig
from cedar.model.dense import Dense
from cedar.model.engram_ids import EngramHashPlan, hash_plans
from cedar.model.state import SequenceState

_STOPPED = -1
_FEW = 8  # rows of a span up to which lists cost less than tensors


class EngramHasher:
    """Token windows to table rows, for every Engram layer of a network. All integers, on the host."""

    def __init__(self, config: EngramConfig, compressed_ids: torch.Tensor) -> None:
        """`compressed_ids` int64 [vocab]. Raises EngramTableError when table sizes contradict the primes."""
        plans = hash_plans(
            layer_ids=config.layer_ids,
            vocab_size=config.vocab_size,
            compressed_vocab_size=config.compressed_vocab_size,
            max_ngram_size=config.max_ngram_size,
            heads=config.heads,
            num_embeddings=config.num_embeddings,
        )
        self.ngram = config.max_ngram_size
        self._compressed = compressed_ids.numpy()
        self._pad = self._compressed[config.pad_token_id]
        self._plans = {plan.layer: _PlanArrays.of(plan) for plan in plans}

    def rows(
        self, spans: Sequence[tuple[SequenceState, int, int]], layers: Container[int]
    ) -> dict[int, torch.Tensor]:
        """Table rows int64 [N, C] of the Engram layers among `layers`, for positions [begin, end) of each."""
        plans = {layer: plan for layer, plan in self._plans.items() if layer in layers}
        if not plans:
            return {}
        if all(end - begin <= _FEW for _, begin, end in spans):
            each = [_one_window(seq, i, self.ngram) for seq, begin, end in spans for i in range(begin, end)]
            windows = np.array(each, np.int64)
        else:
            parts = [token_windows(seq, begin, end, self.ngram).numpy() for seq, begin, end in spans]
            windows = np.concatenate(parts)
        known = windows != _STOPPED
        tokens = np.where(known, self._compressed[np.where(known, windows, 0)], self._pad)
        return {layer: torch.from_numpy(plan.hash(tokens)) for layer, plan in plans.items()}


@dataclass(frozen=True, eq=False)
class _PlanArrays:
    """One layer's constants. NumPy, whose calls on a few numbers cost a fraction of torch's."""

    multipliers: npt.NDArray[np.int64]  # [G]
    primes: npt.NDArray[np.int64]  # [G - 1, heads]
    offsets: npt.NDArray[np.int64]  # [C]

    @classmethod
    def of(cls, plan: EngramHashPlan) -> _PlanArrays:
        return cls(
            multipliers=np.array(plan.multipliers, np.int64),
            primes=np.array(plan.primes, np.int64),
            offsets=np.array(plan.offsets, np.int64),
        )

    def hash(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows [N, C] of compressed windows int64 [N, G]; size n mixes tokens 0..n-1 by wrapping xor."""
        mixed = np.bitwise_xor.accumulate(tokens * self.multipliers, axis=1)
        rows = mixed[:, 1:, None] % self.primes
        return rows.reshape(len(tokens), -1) + self.offsets


def token_windows(seq: SequenceState, begin: int, end: int, ngram: int) -> torch.Tensor:
    """Token ids int64 [end - begin, G]: column k is the token k positions back, -1 from where look-back
    stops.

    It stops at the start of the sequence and at an image position; a position inside an image sees nothing.
    """
    if end - begin == 1:
        return torch.tensor([_one_window(seq, begin, ngram)], dtype=torch.int64)
    first = max(0, begin - ngram + 1)
    lead = begin - first
    ids = torch.tensor(seq.ids[first:end], dtype=torch.int64)
    mask = seq.image_mask(first, end)
    if mask is not None:
        ids = torch.where(mask, _STOPPED, ids)
    ids = torch.nn.functional.pad(ids, (ngram - 1 - lead, 0), value=_STOPPED)
    windows = ids.unfold(0, ngram, 1).flip(1)
    return torch.where((windows == _STOPPED).cummax(1).values, _STOPPED, windows)


def _one_window(seq: SequenceState, position: int, ngram: int) -> list[int]:
    if not seq.images and position + 1 >= ngram:
        return seq.ids[position + 1 - ngram : position + 1][::-1]
    window = []
    for back in range(ngram):
        if position < back or seq.in_image(position - back):
            break
        window.append(seq.ids[position - back])
    return window + [_STOPPED] * (ngram - len(window))


class LookedUp(NamedTuple):
    """Table rows gathered for N positions: payload uint8 (E4M3 bytes) [N, C, E], E8M0 scales [N, C, E/32]."""

    payload: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EngramLayer:
    """The table and weights of one Engram layer."""

    table: torch.Tensor  # uint8 (E4M3 bytes) [rows, E], host
    scales: torch.Tensor  # uint8 E8M0 [rows, E/32], host
    wkv: Dense  # [(hc + 1) * d, C * E]
    q_weight: torch.Tensor  # bf16 [hc, d]
    k_weight: torch.Tensor  # bf16 [hc, d]
    eps: float

    def look_up(self, rows: torch.Tensor) -> LookedUp:
        """What the table holds at rows int64 [N, C]; all on the host."""
        return LookedUp(self.table[rows], self.scales[rows])

    def __call__(self, streams: torch.Tensor, found: LookedUp, is_image: torch.Tensor) -> torch.Tensor:
        """Streams bf16 [N, hc, d] plus the gated value; `found` on any device, is_image bool [N]."""
        n, hc, d = streams.shape
        payload = found.payload.to(streams.device).view(torch.float8_e4m3fn)
        memory = dequantize_fp8(payload, found.scales.to(streams.device)).flatten(1)
        projected = self.wkv(memory)
        key, value = projected[:, : hc * d].view(n, hc, d), projected[:, hc * d :]
        return engram_gate(streams, key, value, self.q_weight, self.k_weight, is_image, self.eps)
