"""Drafting as CUDA graphs: proposing, verifying, keeping what was agreed, on the ladder of `decode_graph`.

Verifying has a rung for each number of rows a sequence, one (nothing was proposed) or a whole block and the
token before it; sequences with fewer repeat their last. Its rows' keys stay in the rung's own memory until
the rung's second graph, `commit`, writes those that stay.

Letters: S sequences of a rung, R rows a sequence, K block of a draft, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from cedar.kernels.decode_tables import FIELDS
from cedar.model import draft
from cedar.model.captured import Captured, GraphPool
from cedar.model.decode_graph import DecodeGraphs, SharedInputs
from cedar.model.decode_step import fill_fields
from cedar.model.draft import DraftNetwork, Proposals, draft_fields
from cedar.model.state import KVMemory, SequenceState
from cedar.model.text import TextNetwork
from cedar.model.verification import Verification, consecutive
from cedar.model.verify_step import BlockRows, VerifyStep, commit_rows

_COUNTS, _IDS = FIELDS, FIELDS + 1  # after a decode step's numbers: how many rows, and all their tokens


class VerifyRung:
    """One shape of verifying."""

    def __init__(
        self,
        text: TextNetwork,
        drafts: DraftNetwork,
        memory: KVMemory,
        shape: tuple[int, int, int, int],
        pool: GraphPool,
    ) -> None:
        """`shape`: S, pages a sequence, tokens that they hold, R."""
        count, width, self._tokens, block = shape
        self._text = text
        self._rings = drafts.rings
        self._memory = weakref.ref(memory)
        self._pool = pool
        self._numbers = torch.arange(count * block).view(count, block)
        self.inputs = SharedInputs(text, memory, (_IDS + block, count), width, count * block)
        self._kept = torch.zeros(count, dtype=torch.int64, device=memory.pages.device)
        self._left: tuple[VerifyStep, list[torch.Tensor]] | None = None
        self.step = Captured(self._step, pool)
        self.commit = Captured(self._commit, pool)

    def verify(self, seqs: Sequence[SequenceState], tokens: Sequence[Sequence[int]]) -> Verification:
        """Run `tokens` of each sequence, the first of which is `ids[length]`; `ids` hold all of them."""
        count, block = self._numbers.shape
        array = self.inputs.begin()
        fill_fields(array[:FIELDS], seqs)
        array[_COUNTS] = 1
        counts = [len(some) for some in tokens]
        for column, some in enumerate(tokens):
            array[_COUNTS, column] = len(some)
            array[_IDS:, column] = [*some, *[some[-1]] * (block - len(some))]
        array[_IDS:, len(seqs) :] = array[_IDS:, :1]
        rows = consecutive(tokens)
        spans = [(seq, seq.length, seq.length + n) for seq, n in zip(seqs, counts, strict=True)]
        self.inputs.send(seqs, self._text.look_up_spans(spans), self._padded_places(rows))
        logits, turn = self.step(), self._pool.turn
        real = [row * block + place for row, n in enumerate(counts) for place in range(n)]
        if len(real) < count * block:
            logits = logits[torch.tensor(real).to(logits.device)]
        else:
            logits = logits.clone()

        def write(kept: Sequence[int]) -> None:
            if self._pool.turn != turn:
                raise RuntimeError("another step has run between a verification and its commit")
            self._kept[: len(kept)].copy_(torch.tensor(kept).pin_memory(), non_blocking=True)
            self.commit(capture=self.step.graph is not None)

        return Verification(logits, rows, tuple(seqs), write)

    def prepare(self) -> None:
        """Compile and capture, with rows that write nothing."""
        while self.commit.graph is None:
            self.inputs.device.fields.zero_()
            self.inputs.device.fields[_COUNTS] = 1
            self.step()
            self.commit(capture=self.step.graph is not None)

    def _padded_places(self, rows: Sequence[range]) -> torch.Tensor:
        """Where among the rows that are given those of the rung are, int64 [S·R]."""
        places = torch.zeros(self._numbers.shape, dtype=torch.int64)
        for row, own in enumerate(rows):
            places[row] = self._numbers[0].clamp_max(len(own) - 1) + own.start
        return places.flatten()

    def _step(self) -> torch.Tensor:
        """Logits fp32 [S·R, V]."""
        memory, text = self._memory(), self._text
        assert memory is not None
        inputs = self.inputs.device
        rows = BlockRows.padded(inputs.fields[_IDS:].T, inputs.fields[_COUNTS])
        step, taps = VerifyStep(memory, text.config, inputs, rows, self._tokens), list[torch.Tensor]()
        streams, pre = text.embed(step, None)
        streams, pre = text.run(
            streams, pre, step, range(text.config.layers), taps=taps, engram=self.inputs.engram
        )
        step.memory = weakref.proxy(memory)  # else the memory's graphs would keep it
        self._left = step, taps
        return text.logits(streams, pre)

    def _commit(self) -> torch.Tensor:
        assert self._left is not None
        commit_rows(*self._left, self._rings, self._kept)
        return self._kept


class ProposeRung:
    """Proposals for S sequences."""

    def __init__(
        self, text: TextNetwork, drafts: DraftNetwork, memory: KVMemory, count: int, pool: GraphPool
    ) -> None:
        self._text = text
        self._drafts = drafts
        self._memory = weakref.ref(memory)
        self._fields = torch.zeros(draft.FIELDS, count, dtype=torch.int64, device=memory.pages.device)
        self.step = Captured(self._step, pool)

    def propose(self, seqs: Sequence[SequenceState]) -> Proposals:
        """After `ids[length]` of each."""
        self._fields.copy_(draft_fields(seqs, self._fields.shape[1]).pin_memory(), non_blocking=True)
        made = self.step()
        return Proposals(*(part[: len(seqs)].clone() for part in (made.tokens, made.confidence, made.logits)))

    def prepare(self) -> None:
        """Compile and capture."""
        while self.step.graph is None:
            self._fields.zero_()
            self.step()

    def _step(self) -> Proposals:
        memory = self._memory()
        assert memory is not None
        return self._drafts.propose(self._text, memory, self._fields)


class DraftGraphs(DecodeGraphs):
    """As its base, of a network with its draft module: decoding is verifying nothing."""

    def __init__(self, text: TextNetwork, memory: KVMemory, page_tokens: int, drafts: DraftNetwork) -> None:
        super().__init__(text, memory, page_tokens)
        self._drafts = drafts
        self._verify: dict[tuple[int, int, int], VerifyRung] = {}
        self._propose: dict[int, ProposeRung] = {}

    @property
    def most_rows(self) -> int:
        """The most rows a sequence that have a rung."""
        return self._drafts.draft.block_size + 1

    def decode(self, seqs: Sequence[SequenceState]) -> torch.Tensor:
        """As its base."""
        verification = self.verify(seqs, [[seq.ids[seq.length]] for seq in seqs])
        verification.write([1] * len(seqs))
        return verification.logits

    def verify(self, seqs: Sequence[SequenceState], tokens: Sequence[Sequence[int]]) -> Verification:
        """Run `tokens` of each sequence, at most `most_rows`: `ids` from `length` on, checked already."""
        longest = max(len(some) for some in tokens)
        end = max(seq.length + len(some) for seq, some in zip(seqs, tokens, strict=True))
        block = 1 if longest == 1 else self.most_rows
        return self._verify_rung(*self.size(len(seqs), end), block).verify(seqs, tokens)

    def propose(self, seqs: Sequence[SequenceState]) -> Proposals:
        """As `DraftNetwork.propose`."""
        return self._propose_rung(self.size(len(seqs), 1)[0]).propose(seqs)

    def prepare(self, batch: int, tokens: int) -> None:
        """As its base."""
        rows, width = self.size(batch, tokens)
        for block in (1, self.most_rows):
            self._verify_rung(rows, width, block).prepare()
        if self._drafts.head is not None:
            self._propose_rung(rows).prepare()

    def _verify_rung(self, rows: int, width: int, block: int) -> VerifyRung:
        key = (rows, width, block)
        if key not in self._verify:
            shape = (rows, width, width * self._page_tokens, block)
            self._verify[key] = VerifyRung(self._text, self._drafts, self._held(), shape, self._pool)
        return self._verify[key]

    def _propose_rung(self, rows: int) -> ProposeRung:
        if rows not in self._propose:
            self._propose[rows] = ProposeRung(self._text, self._drafts, self._held(), rows, self._pool)
        return self._propose[rows]
