"""What a compressed layer does about global entries: produce them, select among them (spec §3).

Letters: N rows, G groups, D head dim, Hi x Di index heads, k entries kept, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from cedar.kernels.compress import EntryPlanes, compress_entries, pool_groups, write_entries
from cedar.kernels.fp4 import pack_fp4_e8m0
from cedar.kernels.index_scores import index_scores, index_scores_gathered
from cedar.kernels.paging import Plane
from cedar.kernels.rope import apply_rope
from cedar.kernels.select import block_positions, candidate_blocks, take_candidates, top_k
from cedar.kvstore import layout as page_layout
from cedar.model.dense import Dense, Plain
from cedar.model.step import GroupPlan, Step

_SCORE_BYTES: Final = 1 << 28  # scores [rows, entries] held at a time


@dataclass(eq=False)
class Selection:
    """What selecting layers leave for the layers above them, within one step."""

    entries: torch.Tensor | None = None  # int32 [N, k], -1 for none
    candidates: torch.Tensor | None = None  # int32 [N, C], -1 for none


@dataclass(frozen=True, kw_only=True)
class SourcePages:
    """Where one key/value source's rows lie in a page."""

    ratio: int
    planes: EntryPlanes

    @classmethod
    def of(cls, source: page_layout.SourceLayout) -> SourcePages:
        """From the page layout."""
        planes = (Plane(plane.offset, plane.row_bytes, plane.rows) for plane in source.planes)
        return cls(ratio=source.ratio, planes=EntryPlanes(*planes))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Compressor:
    """Turns groups of m tokens into packed global entries and index keys.

    `tail` counts sources with m > 1.
    """

    pages: SourcePages
    tail: int
    wkv: Plain
    wgate: Plain | None
    norm: torch.Tensor  # bf16 [D]
    key: Plain  # [Di, D]
    key_norm: torch.Tensor  # bf16 [Di]
    freqs: torch.Tensor  # fp32 [R/2]
    eps: float

    def produce(self, x: torch.Tensor, step: Step) -> None:
        """Write the entries that rows x bf16 [N, d] complete to their pages, the rest to the tails."""
        groups = step.groups(self.pages.ratio)
        pooled = self._pool(x, step, groups)
        if not groups.closes:
            return
        entries = compress_entries(
            pooled, self.norm, self.key.weight, self.key_norm, groups.positions, self.freqs, self.eps
        )
        write_entries(
            step.memory.pages, self.pages.planes, step.page_table, groups.seq, groups.entry, entries
        )

    def _pool(self, x: torch.Tensor, step: Step, groups: GroupPlan) -> torch.Tensor:
        """bf16 [G, D], the latents before their norm."""
        if self.wgate is None:
            return self.wkv(x[groups.members.squeeze(1)])
        depth = self.pages.ratio - 1
        tails = step.memory.tails[:, self.tail]
        kv, gate = self.wkv(x, torch.float32), self.wgate(x, torch.float32)
        before = tails[step.slots, :, :depth]  # [S, 2, m - 1, D]
        together = [torch.cat((before[:, i].flatten(0, 1), new)) for i, new in enumerate((kv, gate))]
        tails[groups.kept_slots, :, groups.kept_places] = torch.stack(
            (kv[groups.kept_rows], gate[groups.kept_rows]), dim=1
        )
        return pool_groups(together[0][groups.members], together[1][groups.members])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Indexer:
    """Scores index keys of the layer's source, or the candidate pool among them, and keeps the best."""

    pages: SourcePages
    wq: Dense  # [Hi * Di, q_lora]
    weights: Plain  # [Hi, d]
    heads: int
    topk: int
    uses_candidates: bool
    candidate_block: int  # 0: makes no pool
    candidate_keep: int
    freqs: torch.Tensor

    def select(self, x: torch.Tensor, q_latent: torch.Tensor, step: Step, selection: Selection) -> None:
        """Set `selection` from x bf16 [N, d] and q_latent bf16 [N, q_lora], a block of rows at a time."""
        q = self.wq(q_latent).view(step.rows, self.heads, -1)
        q_payload, q_scales = pack_fp4_e8m0(apply_rope(q, step.positions, self.freqs))
        scale = q.shape[2] ** -0.5 * self.heads**-0.5
        weights = self.weights(x).to(torch.float64) * scale
        visible = step.visible(self.pages.ratio)
        pool = selection.candidates
        width = step.most_visible(self.pages.ratio) if pool is None else pool.shape[1]
        block = max(1, _SCORE_BYTES // (8 * max(1, width)))
        kept, pools = [], []
        for start in range(0, step.rows, block):
            rows = slice(start, start + block)
            query = (q_payload[rows], q_scales[rows], weights[rows])
            if self.uses_candidates:
                kept.append(self._among(query, selection, step, rows))
                continue
            memory, planes = step.memory.pages, self.pages.planes
            scores = index_scores(
                *query,
                memory,
                planes.index_payload,
                planes.index_scales,
                step.page_table,
                step.seq[rows],
                visible[rows],
                width,
            )
            kept.append(top_k(scores, self.topk))
            if self.candidate_block:
                blocks = candidate_blocks(scores, visible[rows], self.candidate_block, self.candidate_keep)
                pools.append(block_positions(blocks, self.candidate_block, visible[rows]))
        selection.entries = torch.cat(kept)
        if pools:
            selection.candidates = torch.cat(pools)

    def _among(
        self,
        query: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        selection: Selection,
        step: Step,
        rows: slice,
    ) -> torch.Tensor:
        if selection.candidates is None:
            raise RuntimeError(
                "a layer that selects from the candidate pool ran without the layer that makes it"
            )
        pool = selection.candidates[rows]
        planes = self.pages.planes
        scores = index_scores_gathered(
            *query,
            step.memory.pages,
            planes.index_payload,
            planes.index_scales,
            step.page_table,
            step.seq[rows],
            pool,
        )
        return take_candidates(pool, top_k(scores, self.topk))
