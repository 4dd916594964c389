"""One layer's attention: window keys, selected global entries, one softmax with a sink (spec §3).

Letters: N rows, d hidden, H heads, D head dim, G output groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cedar.kernels.grouped_output import grouped_output
from cedar.kernels.latents import norm_latents
from cedar.kernels.sparse_attention import sparse_attention
from cedar.kernels.wide_keys import Shape, WideKeys, expands
from cedar.model.dense import Dense, Rows
from cedar.model.sources import Compressor, Indexer, Selection, SourcePages
from cedar.model.step import Step, WindowPlan


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

    def __call__(self, x: Rows, step: Step, selection: Selection, *, produce: bool) -> torch.Tensor:
        """bf16 [N, d] of normed rows x [N, d]; `produce` False when the entries exist already."""
        window = step.open_window(self.layer)
        wide = self._wide_window(step, window)
        rows = step.window_rows(self.in_decoder)
        place = None if self.pages is None else (step.page_table, step.seq)
        query = Rows(
            *norm_latents(
                self.latents(x),
                self.q_norm,
                self.kv_norm,
                step.rope(self.freqs),
                self.eps,
                window.buffer,
                window.places,
                self._query_orders(step.rows),
                window.staging,
                wide,
            )
        )
        # then q is from the launch before attention, and all else that attention reads is older
        settled = self.indexer is None and not (self.compressor is not None and produce)
        settled = settled and wide is None and self.wq_b.settles(query)
        q = self.wq_b(query).view(step.rows, self.heads, -1)
        if self.compressor is not None and produce:
            self.compressor.produce(x.plain, step)
        if self.indexer is not None:
            self.indexer.select(x.plain, query, step, selection)
        o = self._attend(q, step, place, selection, window.buffer, rows, self._wide_keys(step, wide), settled)
        step.close_window(self.layer, window.buffer)
        o = o.view(step.rows, self.groups, -1)
        return self.wo_b(grouped_output(o, self.wo_a, self.wo_b.orders(step.rows)))

    def _query_orders(self, rows: int) -> tuple[int, ...]:
        """In which orders the query latent is wanted quantised."""
        wanted = self.wq_b.orders(rows)
        if self.indexer is not None:
            wanted += self.indexer.wq.orders(rows)
        return tuple(dict.fromkeys(wanted))

    def _wide_window(self, step: Step, window: WindowPlan) -> torch.Tensor | None:
        """Room for the window's rows expanded, fp16 [R, D], where that and expanding the entries pays."""
        if not step.may_expand:
            return None
        source, width = self.pages, self.kv_norm.shape[0]
        shape = Shape(self.heads, width, step.window, self.freqs.shape[0])
        entries, layers = (0, 1) if source is None else (step.all_visible(source.ratio), source.layers)
        if not expands(step.memory.pages, shape, rows=step.rows, entries=entries, layers=layers):
            return None
        return torch.empty(window.buffer.shape[0], width, dtype=torch.float16, device=step.device)

    def _wide_keys(self, step: Step, window: torch.Tensor | None) -> WideKeys | None:
        """The layer's keys expanded, when its entries of this step are written and `window` is filled."""
        if window is None:
            return None
        source = self.pages
        return WideKeys(None if source is None else step.wide_entries(source.planes, source.ratio), window)

    def _attend(
        self,
        q: torch.Tensor,
        step: Step,
        place: tuple[torch.Tensor, torch.Tensor] | None,
        selection: Selection,
        window: torch.Tensor,
        rows: torch.Tensor,
        wide: WideKeys | None,
        settled: bool,
    ) -> torch.Tensor:
        """o bf16 [N, H, D] after its inverse RoPE, of q before its RoPE; `place`: page table, sequences."""
        rope = step.rope(self.freqs)
        if self.pages is None or place is None:
            none = (None, None, None, None, None, None)
            return sparse_attention(q, *none, window, rows, self.sink, rope, wide, settled=settled)
        planes = self.pages.planes
        return sparse_attention(
            q,
            step.memory.pages,
            planes.main_payload,
            planes.main_scales,
            *place,
            selection.entries,
            window,
            rows,
            self.sink,
            rope,
            wide,
            settled=settled,
        )
