"""The network of one process: prefill, decode, image encoding, and whole-prompt logits (spec §9).

A `Network` holds weights and no request state, so one may serve any number of sequences and memories. Which
methods work depends on the stage it was loaded for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Union
from weakref import WeakKeyDictionary

import torch
from cedar.kvstore.layout import PageLayout
from cedar.model.config import ModelConfig
from cedar.model.decode_graph import DecodeGraphs, fits_graphs
from cedar.model.decode_step import DecodeStep
from cedar.model.draft import DraftNetwork, Proposals, draft_fields
from cedar.model.draft_graph import DraftGraphs
from cedar.model.errors import InputError
from cedar.model.images import PreparedImage, content_hash, image_patches, plan_image, prepare_image
from cedar.model.inputs import image_spans, token_ids
from cedar.model.prompt_errors import naming_image
from cedar.model.schedule import LayerPlan
from cedar.model.state import KVMemory, SequenceState, StreamTail, check_sequence
from cedar.model.step import Step
from cedar.model.text import TextNetwork
from cedar.model.verification import Verification, verify_rows
from cedar.model.vision import VisionTower

if TYPE_CHECKING:
    from PIL import Image

ImageInput = Union[bytes, "Image.Image", PreparedImage]
DEFAULT_CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A loaded model. `text` is None in the encoder stage, `vision` in the prefill and decode stages,
    `drafts`
    where the draft module was not asked for.
    """

    config: ModelConfig
    layout: PageLayout
    plan: tuple[LayerPlan, ...]
    device: torch.device
    stage: str | None
    fingerprint: bytes
    text: TextNetwork | None = field(repr=False)
    vision: VisionTower | None = field(repr=False)
    drafts: DraftNetwork | None = field(default=None, repr=False)
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    _graphs: WeakKeyDictionary[KVMemory, DecodeGraphs] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def prefill(
        self,
        memory: KVMemory,
        seq: SequenceState,
        upto: int,
        features: Mapping[bytes, torch.Tensor] | None = None,
        *,
        replay: bool = True,
        decoder_from: int | None = None,
    ) -> None:
        """Run tokens [seq.length, upto) in one chunk.

        With `replay` (CED) they run the causal encoder and the producing part of the first decoder layer, and
        their streams are kept for `finish_prefill`: of the last W tokens, or from position `decoder_from` on.
        Without it every token runs every layer. `features` by content hash for images in the chunk. Raises
        InputError.
        """
        text = self._text()
        check_sequence(seq, upto, memory, self.config, self.layout.page_tokens)
        first = self.config.decoder_start_layer if replay else self.config.layers
        if upto <= seq.length:
            raise InputError("upto", upto, f"above the sequence's length, {seq.length}")
        tail = _open_tail(seq, first, decoder_from)
        step = Step(memory, self.config, [(seq, seq.length, upto)])
        taps = None if replay else self._taps()
        streams, pre = text.embed(step, features)
        streams, pre = text.run(streams, pre, step, range(first), taps=taps)
        self._keep_taps(step, taps)
        if replay:
            text.produce(streams, pre, step, first)
        keep_from = upto - 1
        if replay:
            keep_from = upto - self.config.window if seq.decoder_from is None else seq.decoder_from
        if tail is None:
            tail = StreamTail.begin(first, seq.length, streams, pre)
        else:
            tail.append(streams, pre)
        tail.drop_below(keep_from)
        seq.tail = tail
        seq.length = upto

    def finish_prefill(self, memory: KVMemory, seq: SequenceState) -> torch.Tensor:
        """Run the decoder over what `prefill` kept; logits fp32 [V] of the last position.

        Raises InputError.
        """
        text = self._text()
        tail = seq.tail
        if tail is None or tail.end != seq.length:
            raise InputError("sequence", f"length {seq.length}", "one that prefill has just extended")
        if tail.start == tail.end:
            raise InputError("decoder_from", seq.decoder_from, f"below the sequence's length, {seq.length}")
        if tail.layer < self.config.layers:
            _begin_decoder(seq, tail, self.config.window)
        layers = range(tail.layer, self.config.layers)
        streams, pre = tail.streams[-1:], tail.pre[-1:]
        for begin in range(tail.start, tail.end, self.chunk_tokens) if layers else ():
            end = min(begin + self.chunk_tokens, tail.end)
            rows = slice(begin - tail.start, end - tail.start)
            step, taps = Step(memory, self.config, [(seq, begin, end)]), self._taps()
            streams, pre = text.run(
                tail.streams[rows], tail.pre[rows], step, layers, produced=tail.layer, taps=taps
            )
            self._keep_taps(step, taps)
        seq.tail = None
        seq.decoder_from = None
        return text.logits(streams[-1:], pre[-1:])[0]

    def decode(self, memory: KVMemory, seqs: Sequence[SequenceState]) -> torch.Tensor:
        """Run `ids[length]` of each sequence through every layer: logits fp32 [B, V]. Lengths grow by one.

        Raises InputError before anything runs when a sequence has no token to run or two share a slot.
        """
        text = self._text()
        self._check_decoding(memory, seqs)
        if self._uses_graphs:
            logits = self._graphs_on(memory).decode(seqs)
        else:
            step, taps = DecodeStep.of(memory, self.config, seqs), self._taps()
            streams, pre = text.embed(step, None)
            streams, pre = text.run(streams, pre, step, range(self.config.layers), taps=taps)
            self._keep_taps(step, taps)
            logits = text.logits(streams, pre)
        for seq in seqs:
            seq.length += 1
            seq.tail = None
        return logits

    def decode_ladder(self, memory: KVMemory, batch: int, tokens: int) -> list[tuple[int, int]]:
        """What to call `prepare_decode` with, one after the other, so that no step of up to `batch` sequences
        of up to `tokens` tokens has to wait for a compiler: (sequences, tokens). Empty where steps need no
        preparation.
        """
        self._text()
        return self._graphs_on(memory).ladder(batch, tokens) if self._uses_graphs else []

    def prepare_decode(self, memory: KVMemory, batch: int, tokens: int) -> None:
        """Get ready for `decode`, and for drafting, of this many sequences of at most `tokens` tokens each.

        On CUDA it compiles and captures what the first such steps would have to; elsewhere it does nothing.
        No sequence's state is touched.
        """
        self._text()
        if self._uses_graphs:
            self._graphs_on(memory).prepare(batch, tokens)

    def propose(self, memory: KVMemory, seqs: Sequence[SequenceState]) -> Proposals:
        """What the draft stages expect after `ids[length]` of each sequence. Changes nothing.

        Raises InputError, also where the network was loaded without its draft module.
        """
        text = self._text()
        if self.drafts is None:
            raise InputError("drafting", False, "True when the network is loaded, to propose tokens")
        self._check_decoding(memory, seqs)
        graphs = self._graphs_on(memory) if self._uses_graphs else None
        if isinstance(graphs, DraftGraphs) and self.drafts.head is not None:
            return graphs.propose(seqs)
        return self.drafts.propose(text, memory, draft_fields(seqs, len(seqs)).to(self.device))

    def verify(
        self, memory: KVMemory, seqs: Sequence[SequenceState], proposed: Sequence[Sequence[int]]
    ) -> Verification:
        """Run `ids[length]` and then the proposed tokens of each sequence through every layer, in one step.

        The first row's logits are those of `decode`, the next ones those it would give if the proposals were
        the tokens that come. Lengths and ids stay as they were until the caller says how many rows to keep:
        `Verification.commit`, which must come before anything else runs on this memory. Raises InputError
        before anything runs.
        """
        text = self._text()
        self._check_decoding(memory, seqs)
        for seq, some in zip(seqs, proposed, strict=True):
            if some and len(seq.ids) != seq.length + 1:
                raise InputError("ids", len(seq.ids), f"{seq.length + 1}: proposals follow the last of them")
        tokens = [[seq.ids[seq.length], *some] for seq, some in zip(seqs, proposed, strict=True)]
        try:
            for seq, some in zip(seqs, proposed, strict=True):
                seq.ids.extend(some)
            for seq, some in zip(seqs, tokens, strict=True):
                check_sequence(seq, seq.length + len(some), memory, self.config, self.layout.page_tokens)
            graphs = self._graphs_on(memory) if self._uses_graphs else None
            if isinstance(graphs, DraftGraphs) and max(map(len, tokens)) <= graphs.most_rows:
                return graphs.verify(seqs, tokens)
            rings = None if self.drafts is None else self.drafts.rings
            return verify_rows(text, memory, seqs, tokens, rings)
        finally:
            for seq, some in zip(seqs, proposed, strict=True):
                del seq.ids[len(seq.ids) - len(some) :]

    def encode_image(self, prepared: PreparedImage) -> torch.Tensor:
        """bf16 [span, d], the rows that stand for an image in a prompt: start, rows and newlines, end."""
        if self.vision is None:
            raise InputError(
                "stage", self.stage, "'encoder' or None, of a checkpoint with vision, to encode images"
            )
        return self.vision.span(prepared.patches.to(self.device), prepared.plan)

    def logits(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        images: Sequence[ImageInput] | None = None,
        replay: bool = True,
    ) -> torch.Tensor:
        """Logits of a whole prompt, fp32 on the network's device, in memory of its own.

        `replay` True: CED prefill with decoder bounded replay, [1, V] of the last position. False: every
        layer for every token, [T, V]. `images` in prompt order, as file bytes, PIL images or prepared ones;
        each stands for its span of image tokens in `input_ids` [T] or [1, T]. Raises InputError or
        ImageError.
        """
        text = self._text()
        ids = token_ids(input_ids, self.config)
        prepared: list[PreparedImage] = []
        for index, image in enumerate(images or ()):
            with naming_image(index):
                prepared.append(self.prepare(image))
        spans = image_spans(ids, [(p.plan, p.content_hash) for p in prepared], self.config.image_token_id)
        features = {p.content_hash: self.encode_image(p) for p in prepared}
        memory, seq = self.own_sequence(ids)
        seq.images = spans
        rows = []
        while seq.length < len(ids):
            upto = min(seq.length + self.chunk_tokens, len(ids))
            if replay:
                self.prefill(memory, seq, upto, features)
                continue
            step = Step(memory, self.config, [(seq, seq.length, upto)])
            streams, pre = text.embed(step, features)
            streams, pre = text.run(streams, pre, step, range(self.config.layers))
            rows.append(text.logits(streams, pre))
            seq.length = upto
        return self.finish_prefill(memory, seq).unsqueeze(0) if replay else torch.cat(rows)

    def allocate(self, *, pages: int, slots: int) -> KVMemory:
        """Memory for this network on its device."""
        return KVMemory.allocate(
            self.config,
            self.layout,
            pages=pages,
            slots=slots,
            device=self.device,
            drafting=self.drafts is not None,
        )

    def own_sequence(self, ids: list[int], room: int = 0) -> tuple[KVMemory, SequenceState]:
        """Memory for one sequence alone, for `ids` and `room` more tokens, and the sequence, not yet run."""
        pages = -(-(len(ids) + room) // self.layout.page_tokens)
        memory = self.allocate(pages=pages, slots=1)
        return memory, SequenceState(slot=0, pages=list(range(pages)), ids=ids)

    def prepare(self, image: ImageInput) -> PreparedImage:
        """Decode, plan and cut one image for this model's tower.

        Raises ImageError, or InputError without a tower.
        """
        if self.config.vision is None:
            raise InputError("images", "given", "absent: this model has no vision_config")
        if isinstance(image, PreparedImage):
            return image
        if isinstance(image, bytes | bytearray | memoryview):
            return prepare_image(bytes(image), self.config.vision)
        if not hasattr(image, "convert"):
            raise InputError("images", type(image).__name__, "file bytes, PIL images or prepared images")
        rgb = image.convert("RGB")
        plan = plan_image(rgb.width, rgb.height, self.config.vision)
        patches = image_patches(rgb, plan, self.config.vision.patch_size)
        return PreparedImage(plan=plan, content_hash=content_hash(rgb, plan), patches=patches)

    def _check_decoding(self, memory: KVMemory, seqs: Sequence[SequenceState]) -> None:
        """InputError unless `ids[length]` of each sequence may run."""
        if not seqs:
            raise InputError("seqs", [], "at least one sequence")
        if len({seq.slot for seq in seqs}) != len(seqs):
            raise InputError("slots", [seq.slot for seq in seqs], "all different")
        for seq in seqs:
            check_sequence(seq, seq.length + 1, memory, self.config, self.layout.page_tokens)
            if seq.tail is not None and seq.tail.waits(seq.length, self.config.layers):
                raise InputError(
                    "sequence", f"length {seq.length}", "finished: finish_prefill comes before decode"
                )
            if seq.in_image(seq.length):
                raise InputError("position", seq.length, "outside the prompt's images: prefill runs those")

    @property
    def _uses_graphs(self) -> bool:
        """Whether steps replay CUDA graphs."""
        return self.device.type == "cuda" and fits_graphs(self.config)

    def _graphs_on(self, memory: KVMemory) -> DecodeGraphs:
        if memory not in self._graphs:
            text, page_tokens = self._text(), self.layout.page_tokens
            self._graphs[memory] = (
                DecodeGraphs(text, memory, page_tokens)
                if self.drafts is None
                else DraftGraphs(text, memory, page_tokens, self.drafts)
            )
        return self._graphs[memory]

    def _taps(self) -> list[torch.Tensor] | None:
        """Where a pass leaves what the draft rings are made of; None without a draft module."""
        return None if self.drafts is None else []

    def _keep_taps(self, step: Step, taps: list[torch.Tensor] | None) -> None:
        if self.drafts is not None and taps:
            self.drafts.rings.write_step(step, taps)

    def _text(self) -> TextNetwork:
        if self.text is None:
            raise InputError("stage", self.stage, "'prefill', 'decode' or None to run text")
        return self.text


def _open_tail(seq: SequenceState, layer: int, decoder_from: int | None) -> StreamTail | None:
    """The kept rows that this chunk continues, None when it begins a prefill. Notes `decoder_from`."""
    tail = seq.tail
    if tail is not None and (tail.layer != layer or tail.end != seq.length):
        tail = None
    if decoder_from is not None:
        lowest = 0 if tail is None or tail.start == tail.began else tail.start
        if decoder_from < lowest:
            raise InputError(
                "decoder_from", decoder_from, f"at least {lowest}: streams below it are not kept"
            )
    if tail is None or decoder_from is not None:
        seq.decoder_from = decoder_from
    return tail


def _begin_decoder(seq: SequenceState, tail: StreamTail, window: int) -> None:
    """Note where window reads of decoder and draft begin after this prefill (spec §9: decoder bounded
    replay).

    A span that goes back to where the prefill began goes on from the rings that were there.
    """
    begins = seq.length - window if seq.decoder_from is None else seq.decoder_from
    if begins >= tail.began:
        seq.decoder_start = seq.draft_start = begins
