"""What a checkpoint is, before anything of it is loaded: the data behind `cedar model inspect`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cedar.kernels.fp8 import window_row_bytes
from cedar.kvstore.layout import PageLayout
from cedar.model.checkpoint import Checkpoint
from cedar.model.config import ModelConfig
from cedar.model.errors import CheckpointError
from cedar.model.fingerprint import fingerprint
from cedar.model.schedule import LayerPlan, layer_plan, page_layout
from cedar.model.state import tailed_ratios
from cedar.model.tensors import STAGES, TensorSpec, expected_tensors, needed_by

_PARTS: Final = (  # first match names the part
    ("draft module", ("mtp.",)),
    ("vision and aligner", ("vision.", "aligner.", "image_")),
    ("embedding", ("embed.",)),
    ("head", ("head.", "norm.")),
    ("routed experts", (".ffn.experts.",)),
    ("shared experts", (".ffn.shared_experts.",)),
    ("engram tables", (".engram.embed.",)),
    ("engram projections", (".engram.",)),
    ("attention", (".attn.",)),
    ("router and streams", ("",)),
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Stored bytes of some tensors, how many they are, and their parameters (scales are none)."""

    tensors: int
    nbytes: int
    parameters: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Size:
        """The sum over `specs`."""
        specs = list(specs)
        return cls(
            tensors=len(specs),
            nbytes=sum(spec.nbytes for spec in specs),
            parameters=sum(_parameters(spec) for spec in specs),
        )


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """A network as its config describes it.

    `stages` names what each stage loads, `parts` what it is made of.
    """

    config: ModelConfig
    layers: tuple[LayerPlan, ...]
    decoder_start_layer: int
    layout: PageLayout
    bytes_per_token: float
    window_bytes: int  # rings and tails of one sequence
    stages: dict[str, Size]
    parts: dict[str, Size]
    total: Size


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint on disk against its plan. `problems` names tensors that are missing or not as expected.

    `fingerprint` is None when there are problems.
    """

    plan: NetworkPlan
    shards: tuple[str, ...]
    file_bytes: int
    problems: tuple[str, ...]
    unexpected: tuple[str, ...]
    fingerprint: bytes | None


def network_plan(config: ModelConfig, page_tokens: int | None = None) -> NetworkPlan:
    """Layers, sources, page format and sizes of a config; opens nothing."""
    layout = page_layout(config, page_tokens)
    specs = list(expected_tensors(config))
    parts: dict[str, list[TensorSpec]] = {part: [] for part, _ in _PARTS}
    for spec in specs:
        parts[_part(spec.name)].append(spec)
    return NetworkPlan(
        config=config,
        layers=layer_plan(config),
        decoder_start_layer=config.decoder_start_layer,
        layout=layout,
        bytes_per_token=layout.bytes_per_token,
        window_bytes=_window_bytes(config),
        stages={stage: Size.of(spec for spec in specs if needed_by(spec.name, stage)) for stage in STAGES},
        parts={part: Size.of(group) for part, group in parts.items() if group},
        total=Size.of(specs),
    )


def inspect_checkpoint(path: str | os.PathLike[str], page_tokens: int | None = None) -> Inspection:
    """Read config, index and shard headers of a checkpoint and compare them with its plan; no weights are
    loaded.

    Raises ConfigError when the config is refused, CheckpointError when the folder or a shard cannot be read.
    """
    checkpoint = Checkpoint.open(os.fspath(path))
    plan = network_plan(checkpoint.config, page_tokens)
    headers = [checkpoint.header(shard) for shard in checkpoint.shards]
    specs = {spec.name: spec for spec in expected_tensors(checkpoint.config)}
    problems = []
    for spec in specs.values():
        try:
            checkpoint.check([spec])
        except CheckpointError as error:
            problems.append(str(error))
    stored = {tensor.name for header in headers for tensor in header.tensors}
    return Inspection(
        plan=plan,
        shards=checkpoint.shards,
        file_bytes=sum(header.file_bytes for header in headers),
        problems=tuple(problems),
        unexpected=tuple(sorted(stored - specs.keys())),
        fingerprint=None if problems else fingerprint(checkpoint, plan.layout),
    )


def _part(name: str) -> str:
    for part, marks in _PARTS:
        for mark in marks:
            if mark in name if mark.startswith(".") else name.startswith(mark):
                return part
    raise AssertionError(name)


def _parameters(spec: TensorSpec) -> int:
    if spec.name.endswith(".scale"):
        return 0
    return math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)


def _window_bytes(config: ModelConfig) -> int:
    rings = config.layers * config.window * window_row_bytes(config.head_dim)
    return rings + sum((ratio - 1) * 2 * 4 * config.head_dim for ratio in tailed_ratios(config))
