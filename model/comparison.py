"""Saved tensors, read one at a time, and running comparisons with what a network gives."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final

import torch
from cedar.model.errors import CheckpointError
from cedar.model.shards import StoredTensor, read_header
from cedar.model.storage import Storage

_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class TensorResult:
    """How one saved tensor compares. Numbers are None when it was not compared; `note` then says why.

    `relative_l2` is |got - saved| / |saved|, `equal_fraction` the part of values that are equal.
    """

    name: str
    shape: tuple[int, ...]
    exact: bool | None = None
    relative_l2: float | None = None
    max_abs: float | None = None
    equal_fraction: float | None = None
    note: str = ""

    @property
    def compared(self) -> bool:
        """Whether the network gave this tensor."""
        return self.exact is not None


class SavedTensors:
    """The tensors of one safetensors file, local or behind a URL, read when asked for."""

    def __init__(self, path: str) -> None:
        folder, self._file = os.path.split(path)
        self._storage = Storage(folder or ".")
        header = read_header(self._storage, self._file)
        self._stored = {tensor.name: tensor for tensor in header.tensors}

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, unread."""
        return self._locate(name).shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the host. Raises CheckpointError when the file does not hold it."""
        stored = self._locate(name)
        if stored.dtype not in _DTYPES:
            raise CheckpointError(f"{name} dtype", stored.dtype, f"one of {sorted(_DTYPES)}")
        raw = self._storage.read_tensor(self._file, stored.begin, stored.end)
        return raw.view(_DTYPES[stored.dtype]).view(stored.shape)

    def beside(self, name: str) -> bool:
        """Whether the folder of the saved tensors holds file `name`."""
        return self._storage.exists(name)

    def read_beside(self, name: str) -> bytes:
        """The whole of file `name` of that folder."""
        return self._storage.read_all(name)

    def _locate(self, name: str) -> StoredTensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(name, "missing", f"a tensor of {self._file}")
        return stored


class Comparison:
    """Results by name, built up from pieces, so that no captured tensor outlives its comparison."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._sums: dict[str, _Sums] = {}

    def add(self, name: str, got: torch.Tensor, start: int = 0) -> None:
        """Compare `got` with rows [start, start + len(got)) of saved tensor `name`, if there is one."""
        if name not in self._saved:
            return
        want = self._saved.read(name)  # prompt tensors are [1, T, ...]
        if want.dim() == got.dim() + 1 and want.shape[0] == 1:
            want = want[0]
        sums = self._sums.setdefault(name, _Sums())
        want = want[start : start + got.shape[0]] if want.dim() else want
        sums.add(got.cpu(), want)

    def results(self, notes: dict[str, str]) -> list[TensorResult]:
        """One result for every saved tensor, in name order; `notes` by name on those not compared."""
        results = []
        for name in self._saved.names:
            shape = self._saved.shape(name)
            sums = self._sums.get(name)
            if sums is None:
                note = notes.get(name, "not a tensor this network gives")
                results.append(TensorResult(name=name, shape=shape, note=note))
            else:
                results.append(sums.result(name, shape))
        return results


@dataclass
class _Sums:
    values: int = 0
    equal: int = 0
    error: float = 0.0
    size: float = 0.0
    largest: float = 0.0
    misshapen: str = ""

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        if got.shape != want.shape:
            self.misshapen = f"shape {list(got.shape)}, saved {list(want.shape)}"
            return
        wide, saved = got.to(torch.float64), want.to(torch.float64)
        difference = (wide - saved).abs()
        self.values += got.numel()
        self.equal += int((wide == saved).sum())
        self.error += float(difference.square().sum())
        self.size += float(saved.square().sum())
        self.largest = max(self.largest, float(difference.max()) if difference.numel() else 0.0)

    def result(self, name: str, shape: tuple[int, ...]) -> TensorResult:
        whole = math.prod(shape)
        if self.misshapen:
            return TensorResult(name=name, shape=shape, exact=False, note=self.misshapen)
        relative = math.sqrt(self.error / self.size) if self.size else math.sqrt(self.error)
        return TensorResult(
            name=name,
            shape=shape,
            exact=self.equal == self.values == whole,
            relative_l2=relative,
            max_abs=self.largest,
            equal_fraction=self.equal / whole if whole else 1.0,
            note="" if self.values == whole else f"compared {self.values} of {whole} values",
        )
