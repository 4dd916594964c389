"""The decode step as CUDA graphs: one for each rung of a ladder of batch sizes and context lengths (spec §9).

A step of forty layers is hundreds of launches of a few microseconds, and starting them from Python costs more
than they do. A captured step is started at once. Its shapes are fixed, so a batch is padded to the next rung
(`decode_step`: padding rows repeat the first and write nothing) and the page table to the next width. What
differs from step to step goes through tensors that stay where they are: one copy from pinned memory for the
fields, one for the page table when a page was added, one for what Engram looked up.

A rung is captured on its second use, or before its first (`prepare`).

Letters: B rows of a rung, V vocabulary, C x E an Engram row.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from cedar.kernels.decode_tables import FIELDS
from cedar.model.captured import Captured, GraphPool
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


def ladder(batch: int, pages: int, most_pages: int) -> list[tuple[int, int]]:
    """Every rung that up to `batch` rows of up to `pages` pages may take, narrow ones first."""
    rows, width = rung(batch, pages, most_pages)
    widths = [rung(1, 1, most_pages)[1]]
    while widths[-1] < width:
        widths.append(rung(1, widths[-1] + 1, most_pages)[1])
    return [(1 << power, each) for each in widths for power in range(rows.bit_length())]


def rung(batch: int, pages: int, most_pages: int) -> tuple[int, int]:
    """Rows and pages of the smallest rung that holds `batch` rows of at most `pages` pages."""
    rows, width = 1, FEWEST_PAGES
    while rows < batch:
        rows *= 2
    while width < pages:
        width *= WIDER
    return rows, max(1, min(width, most_pages))


class SharedInputs:
    """What differs between two steps of one shape: where the device reads it, with pinned twins."""

    def __init__(
        self, text: TextNetwork, memory: KVMemory, fields: Sequence[int], width: int, rows: int
    ) -> None:
        """`fields`: shape of the numbers a step is told; `width`: pages a sequence; Engram for `rows`."""
        device = memory.pages.device
        self.device = DecodeInputs(
            torch.zeros(*fields, dtype=torch.int64, device=device),
            torch.zeros(fields[1], width, dtype=torch.int32, device=device),
        )
        self._fields = torch.zeros(*fields, dtype=torch.int64).pin_memory()
        self._page_table = torch.zeros(fields[1], width, dtype=torch.int32).pin_memory()
        shapes = text.look_up_shapes(rows)
        self.engram = {layer: _empty(shape, device) for layer, shape in shapes.items()}
        self._engram = {layer: _pinned(shape) for layer, shape in shapes.items()}
        self._rows: list[list[int]] = []  # what the page table's rows hold
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> npt.NDArray[np.int64]:
        """The numbers, to be filled: the copies made before have read them."""
        self._copied.synchronize()
        array: npt.NDArray[np.int64] = self._fields.numpy()
        return array

    def send(
        self, seqs: Sequence[SequenceState], found: Mapping[int, LookedUp], places: torch.Tensor | None = None
    ) -> None:
        """Put numbers, pages and what Engram looked up in place. Returns at once; the copies are ordered
        before what runs next. Row r takes found[places[r]]; without `places` its own, or the first past the
        last.
        """
        self.device.fields.copy_(self._fields, non_blocking=True)
        wanted = [seq.pages for seq in seqs] + [seqs[0].pages] * (self._page_table.shape[0] - len(seqs))
        if wanted != self._rows:
            table = self._page_table.numpy()
            for row, pages in enumerate(wanted):
                if row >= len(self._rows) or self._rows[row] != pages:
                    table[row, : len(pages)] = pages[: table.shape[1]]
            self._rows = [list(pages) for pages in wanted]
            self.device.page_table.copy_(self._page_table, non_blocking=True)
        for layer, parts in found.items():
            for twin, device, part in zip(self._engram[layer], self.engram[layer], parts, strict=True):
                if places is not None:
                    torch.index_select(part, 0, places, out=twin)
                else:
                    twin[: part.shape[0]] = part
                    twin[part.shape[0] :] = part[0]
                device.copy_(twin, non_blocking=True)
        self._copied.record()


class DecodeRung:
    """One shape of plain decoding."""

    def __init__(
        self, text: TextNetwork, memory: KVMemory, rows: int, width: int, tokens: int, pool: GraphPool
    ) -> None:
        self._text = text
        self._memory = weakref.ref(memory)
        self._tokens = tokens
        self.inputs = SharedInputs(text, memory, (FIELDS, rows), width, rows)
        self.step = Captured(self._step, pool)

    def fill(self, seqs: Sequence[SequenceState]) -> None:
        """Put a batch's inputs in place."""
        fill_fields(self.inputs.begin(), seqs)
        spans = [(seq, seq.length, seq.length + 1) for seq in seqs]
        self.inputs.send(seqs, self._text.look_up_spans(spans))

    def prepare(self) -> None:
        """Compile and capture, with rows that write nothing."""
        while self.step.graph is None:
            self.inputs.device.fields.zero_()
            self.step()

    def _step(self) -> torch.Tensor:
        """Logits fp32 [B, V]."""
        memory, text = self._memory(), self._text
        assert memory is not None
        step = DecodeStep(memory, text.config, self.inputs.device, self._tokens)
        streams, pre = text.embed(step, None)
        streams, pre = text.run(streams, pre, step, range(text.config.layers), engram=self.inputs.engram)
        return text.logits(streams, pre)


class DecodeGraphs:
    """All rungs of one network on one memory. Not thread safe: one engine, one stream."""

    def __init__(self, text: TextNetwork, memory: KVMemory, page_tokens: int) -> None:
        self._text = text
        self._memory = weakref.ref(memory)
        self._page_tokens = page_tokens
        positions = text.config.max_position_embeddings
        self._most_pages = min(memory.pages.shape[0], -(-positions // page_tokens))
        self._rungs: dict[tuple[int, int], DecodeRung] = {}
        self._pool = GraphPool()

    def decode(self, seqs: Sequence[SequenceState]) -> torch.Tensor:
        """Logits fp32 [len(seqs), V], a new tensor, of the sequences' next tokens, checked already."""
        one = self._rung(*self.size(len(seqs), max(seq.length for seq in seqs) + 1))
        one.fill(seqs)
        return one.step()[: len(seqs)].clone()

    def ladder(self, batch: int, tokens: int) -> list[tuple[int, int]]:
        """What to `prepare` for up to `batch` sequences of up to `tokens` tokens: (sequences, tokens) of each
        rung.
        """
        pages = min(-(-tokens // self._page_tokens), self._most_pages)
        rungs = ladder(batch, pages, self._most_pages) if tokens else []
        return [(rows, width * self._page_tokens) for rows, width in rungs]

    def prepare(self, batch: int, tokens: int) -> None:
        """Compile and capture the rung of `batch` sequences of at most `tokens` tokens. Writes no sequence's
        state.
        """
        self._rung(*self.size(batch, tokens)).prepare()

    def size(self, batch: int, tokens: int) -> tuple[int, int]:
        """The rung of `batch` sequences of at most `tokens` tokens."""
        return rung(batch, -(-tokens // self._page_tokens), self._most_pages)

    def _rung(self, rows: int, width: int) -> DecodeRung:
        if (rows, width) not in self._rungs:
            tokens = width * self._page_tokens
            self._rungs[rows, width] = DecodeRung(self._text, self._held(), rows, width, tokens, self._pool)
        return self._rungs[rows, width]

    def _held(self) -> KVMemory:
        memory = self._memory()
        assert memory is not None
        return memory


def _empty(shape: tuple[torch.Size, torch.Size], device: torch.device) -> LookedUp:
    return LookedUp(*(torch.zeros(size, dtype=torch.uint8, device=device) for size in shape))


def _pinned(shape: tuple[torch.Size, torch.Size]) -> LookedUp:
    return LookedUp(*(torch.zeros(size, dtype=torch.uint8).pin_memory() for size in shape))
