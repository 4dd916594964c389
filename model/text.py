"""The text network: embedding, the stack of layers, the head (spec §3).

Letters: N rows of a step, hc streams, d hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from cedar.kernels.mhc import mhc_collapse
from cedar.kernels.norm import rms_norm
from cedar.model.block import Layer, Observe
from cedar.model.config import ModelConfig
from cedar.model.dense import Plain
from cedar.model.engram import EngramHasher, LookedUp
from cedar.model.errors import InputError
from cedar.model.residual import Residual
from cedar.model.sources import Selection
from cedar.model.step import Span, Step


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TextNetwork:
    """All text weights. Stateless: memory and sequences come with the step."""

    config: ModelConfig
    embedding: torch.Tensor  # bf16 [V, d]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # bf16 [d]
    head: Plain  # [V, d]
    hasher: EngramHasher | None

    def embed(
        self, step: Step, features: Mapping[bytes, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams bf16 [N, hc, d], all copies of the embedding, and the first pre fp32 [N, hc].

        Rows inside an image are taken from `features[content_hash]` bf16 [span, d]. Raises InputError when
        missing.
        """
        rows = self.embedding[step.ids]
        offset = 0
        for seq, begin, end in step.spans:
            for number, image in enumerate(seq.images):
                low, high = max(image.start, begin), min(image.end, end)
                if low < high:
                    span = self._features(features, image.content_hash, image.length, number)
                    rows[offset + low - begin : offset + high - begin] = span[
                        low - image.start : high - image.start
                    ]
            offset += end - begin
        return self.enter(rows)

    def enter(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and the first pre of embedded rows bf16 [N, d]."""
        streams = rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(rows.shape[0], self.config.hc_mult, device=rows.device)
        pre[:, 0] = 1.0
        return streams, pre

    def hash_rows(self, step: Step, layers: range) -> dict[int, torch.Tensor]:
        """Table rows of the Engram layers among `layers` for the step's positions, on the host."""
        return {} if self.hasher is None else self.hasher.rows(step.spans, layers)

    def look_up(self, hashed: Mapping[int, torch.Tensor]) -> dict[int, LookedUp]:
        """What the tables of those layers hold there, on the host."""
        found = {}
        for number, rows in hashed.items():
            engram = self.layers[number].engram
            if engram is not None:
                found[number] = engram.look_up(rows)
        return found

    def look_up_spans(self, spans: Sequence[Span]) -> dict[int, LookedUp]:
        """As `look_up`, for every layer, of the tokens of some spans."""
        if self.hasher is None:
            return {}
        return self.look_up(self.hasher.rows(spans, range(self.config.layers)))

    def look_up_shapes(self, rows: int) -> dict[int, tuple[torch.Size, torch.Size]]:
        """Shapes of what is looked up for that many rows: payload and scales, by layer."""
        shapes = {}
        for number, layer in enumerate(self.layers):
            if layer.engram is not None and self.config.engram is not None:
                columns = self.config.engram.columns
                parts = (layer.engram.table, layer.engram.scales)
                payload, scales = (torch.Size((rows, columns, part.shape[1])) for part in parts)
                shapes[number] = (payload, scales)
        return shapes

    def run(
        self,
        streams: torch.Tensor,
        pre: torch.Tensor,
        step: Step,
        layers: range,
        *,
        produced: int | None = None,
        observe: Observe | None = None,
        taps: list[torch.Tensor] | None = None,
        engram: Mapping[int, LookedUp] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and pre after `layers`, which must hold the sources of whatever they read a selection of.

        `produced`: a source among them whose entries exist already. `taps` receives the mean streams bf16
        [N, d] that enter the draft targets among `layers`. `engram`: what was looked up for the step, when
        the caller has done so.
        """
        hashed = self.hash_rows(step, layers) if engram is None else {}
        found = self.look_up(hashed) if engram is None else engram
        selection, residual = Selection(), Residual(streams, pre)
        if observe is not None:
            for layer in layers:
                if layer in hashed:
                    observe(f"layer{layer:02d}.engram_hash", hashed[layer])
        for layer in layers:
            self.layers[layer].advance(
                residual,
                step,
                selection,
                found.get(layer),
                produce=layer != produced,
                observe=observe,
                taps=taps,
            )
        step.drop_wide_entries()
        return residual.settled(), residual.pre

    def produce(self, streams: torch.Tensor, pre: torch.Tensor, step: Step, layer: int) -> None:
        """Only the entries of source `layer`, from what enters it."""
        found = self.look_up(self.hash_rows(step, range(layer, layer + 1)))
        self.layers[layer].produce_entries(streams, pre, step, found.get(layer))

    def logits(
        self, streams: torch.Tensor, pre: torch.Tensor, observe: Observe | None = None
    ) -> torch.Tensor:
        """fp32 [N, V] of what the last layer hands on."""
        normed = rms_norm(mhc_collapse(streams, pre), self.norm, self.config.rms_norm_eps)
        if observe is not None:
            observe("final_normed", normed)
        return self.head(normed, torch.float32)

    def _features(
        self, features: Mapping[bytes, torch.Tensor] | None, content_hash: bytes, length: int, number: int
    ) -> torch.Tensor:
        field = f"features of image {number}"
        rows = None if features is None else features.get(content_hash)
        if rows is None:
            raise InputError(field, "missing", f"given for content hash {content_hash.hex()}")
        expected = [length, self.config.hidden_size]
        if list(rows.shape) != expected or rows.dtype != torch.bfloat16:
            raise InputError(field, f"{rows.dtype} {list(rows.shape)}", f"torch.bfloat16 {expected}")
        return rows.to(self.embedding.device)
