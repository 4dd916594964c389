"""The decode step as CUDA graphs: one for each rung of a ladder of batch sizes and context lengths (spec §9).

A step of forty layers is hundreds of launches of a few microseconds, and starting them from Python costs more
than they do. A captured step is started at once. Its shapes are fixed, so a batch is padded to the next rung
(`decode_step`: padding rows repeat the first and write nothing) and the page table to the next width. What
differs from step to step goes through tensors that stay where they are: one copy from pinned memory for the
fields, one for the page table when a page was added, one for what Engram looked up.

A rung is captured on its second use, or before its first (`prepare`); an eager run compiles what is to be
compiled. All rungs share one memory pool, because only one of them runs at a time.

Letters: B rows of a rung, V vocabulary, C x E an Engram row.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cedar.kernels.decode_tables import FIELDS
from cedar.model.config import ModelConfig
from cedar.model.decode_step import DecodeInputs, DecodeStep, fill_fields
from cedar.model.engram import LookedUp
from cedar.model.state import KVMemory, SequenceState
from cedar.model.text import TextNetwork

FEWEST_PAGES = 16
WIDER = 4  # how much wider the next rung's page table is


def fits_graphs(config: ModelConfig) -> bool:
    """Whether every operation of a step has a kernel at these sizes, so that nothing waits for the device."""
    return (
        config.hc_mult == 4
        and config.head_dim.bit_count() == 1
        and config.index_head_dim.bit_count() == 1
        and config.index_head_dim >= 32
    )


def rung(batch: int, pages: int, most_pages: int) -> tuple[int, int]:
    """Rows and pages of the smallest rung that holds `batch` rows of at most `pages` pages."""
    rows, width = 1, FEWEST_PAGES
    while rows < batch:
        rows *= 2
    while width < pages:
        width *= WIDER
    return rows, max(1, min(width, most_pages))


@dataclass(eq=False)
class _Host:
    """Pinned twins of a rung's inputs, and what the page table's rows hold."""

    fields: torch.Tensor
    page_table: torch.Tensor
    engram: dict[int, LookedUp]
    rows: list[list[int]] = field(default_factory=list)

    @property
    def fields_array(self) -> npt.NDArray[np.int64]:
        array: npt.NDArray[np.int64] = self.fields.numpy()
        return array


class _Rung:
    """One shape: its inputs on the device, their twins on the host, and the graph once captured."""

    def __init__(self, text: TextNetwork, memory: KVMemory, rows: int, width: int, tokens: int) -> None:
        device = memory.pages.device
        self._text = text
        self._memory = weakref.ref(memory)
        self._tokens = tokens
        self.inputs = DecodeInputs(
            torch.zeros(FIELDS, rows, dtype=torch.int64, device=device),
            torch.zeros(rows, width, dtype=torch.int32, device=device),
        )
        shapes = text.look_up_shapes(rows)
        self._engram = {layer: _empty(shape, device) for layer, shape in shapes.items()}
        self._host = _Host(
            torch.zeros(FIELDS, rows, dtype=torch.int64).pin_memory(),
            torch.zeros(rows, width, dtype=torch.int32).pin_memory(),
            {layer: _pinned(shape) for layer, shape in shapes.items()},
        )
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None
        self.runs = 0

    def fill(self, seqs: Sequence[SequenceState]) -> None:
        """Put a batch's inputs in place. Returns at once; the copies are ordered before what runs next."""
        host, rows = self._host, self.inputs.fields.shape[1]
        self._copied.synchronize()  # the copies before these have read the pinned twins
        fill_fields(host.fields_array, seqs)
        self.inputs.fields.copy_(host.fields, non_blocking=True)
        wanted = [seq.pages for seq in seqs] + [seqs[0].pages] * (rows - len(seqs))
        if wanted != host.rows:
            table = host.page_table.numpy()
            for row, pages in enumerate(wanted):
                if row >= len(host.rows) or host.rows[row] != pages:
                    table[row, : len(pages)] = pages[: table.shape[1]]
            host.rows = [list(pages) for pages in wanted]
            self.inputs.page_table.copy_(host.page_table, non_blocking=True)
        for layer, found in self._text.look_up_next(seqs).items():
            for twin, device, rows_found in zip(host.engram[layer], self._engram[layer], found, strict=True):
                twin[: len(seqs)] = rows_found
                twin[len(seqs) :] = rows_found[0]
                device.copy_(twin, non_blocking=True)
        self._copied.record()

    def idle(self) -> None:
        """Put rows in place that write nothing."""
        self.inputs.fields.zero_()

    def run(self, pool: Any) -> torch.Tensor:
        """Logits fp32 [B, V] of the inputs in place; overwritten by the next run of any rung."""
        self.runs += 1
        if self.runs == 1:
            return self._step()
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._logits = self._step()
            self.graph = graph
        self.graph.replay()
        assert self._logits is not None
        return self._logits

    def _step(self) -> torch.Tensor:
        memory, text = self._memory(), self._text
        assert memory is not None
        step = DecodeStep(memory, text.config, self.inputs, self._tokens)
        streams, pre = text.embed(step, None)
        streams, pre = text.run(streams, pre, step, range(text.config.layers), engram=self._engram)
        return text.logits(streams, pre)


class DecodeGraphs:
    """All rungs of one network on one memory. Not thread safe: one engine, one stream."""

    def __init__(self, text: TextNetwork, memory: KVMemory, page_tokens: int) -> None:
        self._text = text
        self._memory = weakref.ref(memory)
        self._page_tokens = page_tokens
        positions = text.config.max_position_embeddings
        self._most_pages = min(memory.pages.shape[0], -(-positions // page_tokens))
        self._rungs: dict[tuple[int, int], _Rung] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def decode(self, seqs: Sequence[SequenceState]) -> torch.Tensor:
        """Logits fp32 [len(seqs), V], a new tensor, of the sequences' next tokens, checked already."""
        pages = -(-(max(seq.length for seq in seqs) + 1) // self._page_tokens)
        one = self._rung(*rung(len(seqs), pages, self._most_pages))
        one.fill(seqs)
        return one.run(self._pool)[: len(seqs)].clone()

    def prepare(self, batch: int, tokens: int) -> None:
        """Compile and capture the rung of `batch` sequences of at most `tokens` tokens. Writes no sequence's
        state.
        """
        one = self._rung(*rung(batch, -(-tokens // self._page_tokens), self._most_pages))
        while one.graph is None:
            one.idle()
            one.run(self._pool)

    def _rung(self, rows: int, width: int) -> _Rung:
        if (rows, width) not in self._rungs:
            memory = self._memory()
            assert memory is not None
            tokens = width * self._page_tokens
            self._rungs[rows, width] = _Rung(self._text, memory, rows, width, tokens)
        return self._rungs[rows, width]


def _empty(shape: tuple[torch.Size, torch.Size], device: torch.device) -> LookedUp:
    return LookedUp(*(torch.zeros(size, dtype=torch.uint8, device=device) for size in shape))


def _pinned(shape: tuple[torch.Size, torch.Size]) -> LookedUp:
    return LookedUp(*(torch.zeros(size, dtype=torch.uint8).pin_memory() for size in shape))
