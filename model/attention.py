"""One layer's attention: window keys, selected global entries, one softmax with a sink (spec §3).

Letters: N rows, d hidden, H heads, D head dim, G output groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cedar.kernels.fp8 import pack_window_rows
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.norm import rms_norm
from cedar.kernels.rope import apply_rope
from cedar.kernels.sparse_attention import sparse_attention
from cedar.model.dense import Dense
from cedar.model.sources import Compressor, Indexer, Selection, SourcePages
from cedar.model.step import Step


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Attention:
    """Weights and place of one layer's attention. `pages` is None in a window-only layer."""

    layer: int
    in_decoder: bool
    heads: int
    groups: int
    eps: float
    latents: Dense  # wq_a over wkv [q_lora + D, d]
    q_norm: torch.Tensor  # bf16 [q_lora]
    wq_b: Dense
    kv_norm: torch.Tensor  # bf16 [D]
    sink: torch.Tensor  # fp32 [H]
    wo_a: torch.Tensor  # bf16 or float64 [G, o_lora, H*D/G]
    wo_b: Dense
    freqs: torch.Tensor  # fp32 [R/2]
    pages: SourcePages | None
    compressor: Compressor | None
    indexer: Indexer | None

    def __call__(self, x: torch.Tensor, step: Step, selection: Selection, *, produce: bool) -> torch.Tensor:
        """bf16 [N, d] of normed rows x bf16 [N, d]; `produce` False when the entries exist already."""
        latents = self.latents(x)
        q_lora = self.q_norm.shape[0]
        q_latent = rms_norm(latents[:, :q_lora], self.q_norm, self.eps)
        q = apply_rope(self.wq_b(q_latent).view(step.rows, self.heads, -1), step.positions, self.freqs)
        key = apply_rope(rms_norm(latents[:, q_lora:], self.kv_norm, self.eps), step.positions, self.freqs)
        if self.compressor is not None and produce:
            self.compressor.produce(x, step)
        if self.indexer is not None:
            self.indexer.select(x, q_latent, step, selection)
        rows = pack_window_rows(key)
        window = step.write_window(self.layer, rows)
        o = self._attend(q, step, selection, window)
        step.close_window(self.layer, rows)
        o = apply_rope(o, step.positions, self.freqs, inverse=True)
        return self.wo_b(grouped_output(o.view(step.rows, self.groups, -1), self.wo_a))

    def _attend(
        self, q: torch.Tensor, step: Step, selection: Selection, window: torch.Tensor
    ) -> torch.Tensor:
        window_rows = step.window_rows(self.in_decoder)
        if self.pages is None:
            return sparse_attention(q, None, None, None, None, None, None, window, window_rows, self.sink)
        planes = self.pages.planes
        return sparse_attention(
            q,
            step.memory.pages,
            planes.main_payload,
            planes.main_scales,
            step.page_table,
            step.seq,
            selection.entries,
            window,
            window_rows,
            self.sink,
        )
