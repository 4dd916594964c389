"""A published-layout checkpoint: which file holds which tensor, and reading only those that a stage runs
(spec §2).

`Checkpoint.open` reads `config.json` and the index; `check` compares headers with the config before any
weight is read; `read` then fetches byte ranges in file order. Nothing else of a shard is touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cedar.model.config import ModelConfig, parse_config
from cedar.model.errors import CheckpointError
from cedar.model.shards import ShardHeader, StoredTensor, read_header
from cedar.model.storage import Storage
from cedar.model.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
CONFIG_NAME: Final = "config.json"
TOKENIZER_NAME: Final = "tokenizer.json"

_RANGE_BYTES: Final = 1 << 26


@dataclass
class Checkpoint:
    """An opened checkpoint folder. `read_names` lists the tensors whose bytes were read, in order."""

    storage: Storage
    config: ModelConfig
    config_json: bytes
    shard_of: Mapping[str, str] | None  # from the index; None when a single file holds everything
    read_names: list[str] = field(default_factory=list)
    _headers: dict[str, ShardHeader] = field(default_factory=dict)
    _stored: dict[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str) -> Checkpoint:
        """Open a local folder or fsspec URL. Raises ConfigError or CheckpointError naming what is wrong."""
        storage = Storage(str(path))
        if not storage.exists(CONFIG_NAME):
            raise CheckpointError("path", str(path), f"a folder that holds {CONFIG_NAME}")
        config_json = storage.read_all(CONFIG_NAME)
        config = parse_config(config_json)
        return cls(storage=storage, config=config, config_json=config_json, shard_of=_read_index(storage))

    @property
    def shards(self) -> tuple[str, ...]:
        """File names of all shards, sorted."""
        return (SINGLE_NAME,) if self.shard_of is None else tuple(sorted(set(self.shard_of.values())))

    def header(self, shard: str) -> ShardHeader:
        """The checked header of `shard`, read once."""
        if shard not in self._headers:
            header = read_header(self.storage, shard)
            for tensor in header.tensors:
                if self.shard_of is None or self.shard_of.get(tensor.name) == shard:
                    self._stored[tensor.name] = tensor
            self._headers[shard] = header
        return self._headers[shard]

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Compare headers with `specs`; reads no weights.

        Raises CheckpointError naming the first tensor that differs.
        """
        for spec in specs:
            self._locate(spec)

    def read(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Each tensor of `specs` on the host, in file order. Neighbours in a file are fetched together."""
        located = sorted(
            ((self._locate(spec), spec) for spec in specs), key=lambda p: (p[0].shard, p[0].begin)
        )
        groups = list(_neighbours(located))
        ranges = [(group[0][0].shard, group[0][0].begin, group[-1][0].end) for group in groups]
        for group, buffer in zip(groups, self.storage.read_tensors(ranges), strict=True):
            start = group[0][0].begin
            for stored, spec in group:
                self.read_names.append(spec.name)
                yield spec, _as_tensor(buffer[stored.begin - start : stored.end - start], spec)

    def map(self, spec: TensorSpec) -> torch.Tensor:
        """One tensor on the host, left on disk until touched where the checkpoint is local."""
        stored = self._locate(spec)
        self.read_names.append(spec.name)
        raw = self.storage.map_tensor(stored.shard, stored.begin, stored.end)
        return raw.view(_torch_dtype(spec)).view(spec.shape)

    def _locate(self, spec: TensorSpec) -> StoredTensor:
        wanted = f"{spec.dtype} {list(spec.shape)}"
        if self.shard_of is not None and spec.name not in self.shard_of:
            raise CheckpointError(spec.name, "missing", f"in {INDEX_NAME} as {wanted}")
        shard = SINGLE_NAME if self.shard_of is None else self.shard_of[spec.name]
        self.header(shard)
        stored = self._stored.get(spec.name)
        if stored is None:
            raise CheckpointError(spec.name, "missing", f"in {shard} as {wanted}")
        if stored.dtype != spec.dtype:
            raise CheckpointError(
                f"{spec.name} dtype", stored.dtype, f"{spec.dtype}, shape {list(spec.shape)}"
            )
        if stored.shape != spec.shape:
            raise CheckpointError(
                f"{spec.name} shape", list(stored.shape), f"{list(spec.shape)}, dtype {spec.dtype}"
            )
        return stored


def _read_index(storage: Storage) -> dict[str, str] | None:
    if not storage.exists(INDEX_NAME):
        if not storage.exists(SINGLE_NAME):
            raise CheckpointError("path", storage.path, f"a folder that holds {INDEX_NAME} or {SINGLE_NAME}")
        return None
    try:
        index: Any = json.loads(storage.read_all(INDEX_NAME))
    except ValueError as error:
        raise CheckpointError(INDEX_NAME, str(error), "valid JSON") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{INDEX_NAME} weight_map", weight_map, "an object from tensor names to file names"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard.startswith(".") or "/" in shard or "\\" in shard:
            raise CheckpointError(
                f"{INDEX_NAME} weight_map[{name}]", shard, "the plain name of a file in this folder"
            )
    return weight_map


def _neighbours(
    located: list[tuple[StoredTensor, TensorSpec]],
) -> Iterator[list[tuple[StoredTensor, TensorSpec]]]:
    """Runs of tensors that touch each other in a file, up to a range's worth of bytes."""
    run: list[tuple[StoredTensor, TensorSpec]] = []
    for item in located:
        stored = item[0]
        if run:
            first, last = run[0][0], run[-1][0]
            touches = stored.shard == last.shard and stored.begin == last.end
            if not touches or stored.end - first.begin > _RANGE_BYTES:
                yield run
                run = []
        run.append(item)
    if run:
        yield run


def _as_tensor(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A typed tensor with memory of its own, so that no neighbour of it is kept alive."""
    return raw.clone().view(_torch_dtype(spec)).view(spec.shape)


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    import torch  # fingerprints and prompts need the rest of this module only

    return {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.uint8,  # scales are handed about as the bytes that are stored
        "I8": torch.uint8,  # two E2M1 codes a byte
    }[spec.dtype]
