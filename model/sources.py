"""What a compressed layer does about global entries: produce them, select among them (spec §3).

Letters: N rows, G groups, D head dim, Hi x Di index heads, k entries kept, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from cedar.kernels.compress import EntryPlanes, compress_into_pages
from cedar.kernels.index_queries import IndexQueries, pack_index_queries
from cedar.kernels.index_scores import index_scores, index_scores_gathered
from cedar.kernels.paging import Plane
from cedar.kernels.select import block_positions, candidate_blocks, take_candidates, top_k
from cedar.kvstore import layout as page_layout
from cedar.model.dense import Dense, Plain, Rows
from cedar.model.step import GroupPlan, Step

_SCORE_BYTES: Final = 1 << 28  # scores [rows, entries] held at a time


@dataclass(eq=False)
class Selection:
    """What selecting layers leave for the layers above them, within one step."""

    entries: torch.Tensor | None = None  # int32 [N, k], -1 for none
    candidates: torch.Tensor | None = None  # int32 [N, C], -1 for none


@dataclass(frozen=True, kw_only=True)
class SourcePages:
    """Where one key/value source's rows lie in a page, and how many layers read them."""

    ratio: int
    planes: EntryPlanes
    layers: int

    @classmethod
    def of(cls, source: page_layout.SourceLayout, layers: int) -> SourcePages:
        """From the page layout."""
        planes = (Plane(plane.offset, plane.row_bytes, plane.rows) for plane in source.planes)
        return cls(ratio=source.ratio, planes=EntryPlanes(*planes), layers=layers)


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
        step.drop_wide_entries()
        groups = step.groups(self.pages.ratio)
        members = self._members(x, step, groups)
        if not groups.closes:
            return
        compress_into_pages(
            *members,
            self.norm,
            self.key.weight,
            self.key_norm,
            groups.positions,
            self.freqs,
            self.eps,
            step.memory.pages,
            self.pages.planes,
            step.page_table,
            groups.seq,
            groups.entry,
            step.group_rope(self.pages.ratio, self.freqs),
        )

    def _members(
        self, x: torch.Tensor, step: Step, groups: GroupPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """kv and gate fp32 [G, m, D] of the groups that close; at m = 1 the latents bf16 [G, D] and None."""
        if self.wgate is None:
            return self.wkv(groups.take(x)), None
        kv, gate = self.wkv(x, torch.float32), self.wgate(x, torch.float32)
        return step.join_groups(self.tail, self.pages.ratio, kv, gate)


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

    def select(self, x: torch.Tensor, query: Rows, step: Step, selection: Selection) -> None:
        """Set `selection` from x bf16 [N, d] and the query latent [N, q_lora], a block of rows at a time."""
        page_table, seq = step.page_table, step.seq  # older than the queries' launch: `index_scores`
        q = self.wq(query).view(step.rows, self.heads, -1)
        scale = q.shape[2] ** -0.5 * self.heads**-0.5
        queries = pack_index_queries(q, self.weights(x), step.rope(self.freqs), scale)
        visible = step.visible(self.pages.ratio)
        pool = selection.candidates
        width = step.most_visible(self.pages.ratio) if pool is None else pool.shape[1]
        block = max(1, _SCORE_BYTES // (8 * max(1, width)))
        kept, pools = [], []
        for start in range(0, step.rows, block):
            rows = slice(start, start + block)
            some = IndexQueries(*(part[rows] for part in queries))
            if self.uses_candidates:
                kept.append(self._among(some, selection, step, rows))
                continue
            memory, planes = step.memory.pages, self.pages.planes
            scores = index_scores(
                *some,
                memory,
                planes.index_payload,
                planes.index_scales,
                page_table,
                seq[rows],
                visible[rows],
                width,
            )
            kept.append(top_k(scores, self.topk))
            if self.candidate_block:
                keep = min(self.candidate_keep, max(1, -(-width // self.candidate_block)))  # the rest is -1
                blocks = candidate_blocks(scores, visible[rows], self.candidate_block, keep)
                pools.append(block_positions(blocks, self.candidate_block, visible[rows]))
        selection.entries = _together(kept)
        if pools:
            selection.candidates = _together(pools)

    def _among(
        self,
        queries: IndexQueries,
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
            *queries,
            step.memory.pages,
            planes.index_payload,
            planes.index_scales,
            step.page_table,
            step.seq[rows],
            pool,
        )
        return take_candidates(pool, top_k(scores, self.topk))


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """All rows of the parts, without a copy when there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
