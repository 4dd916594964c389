"""The short-lived state of a sequence as bytes: rings, compressor tails, the unsealed last page (spec §5,
design §5).

A record belongs to one exact length n. With it, and with the sealed pages below n, a sequence goes on in
another slot, other page slots or another process as if it had never stopped. Only what the sequence may read
is written: ring rows below its window starts and page rows of other sequences' leftovers never leave the
process.

    header | rings [L, min(n, W), D + D/32] oldest first | for every source with m > 1: kv, gate fp32 [n mod
    m, D]
           | for every plane of the unsealed page: its rows so far
           | draft rings [stages, min(n - draft start, W), D + D/32] oldest first

Draft rings are missing (draft start n) where the writer drafts nothing, and are ignored where the reader does
not: they decide how many proposals are accepted, never a token.

The header carries the model's fingerprint, every dimension and a CRC-32 of the body. All numbers are little
endian.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import torch
from cedar.kernels.fp8 import window_row_bytes
from cedar.model.errors import InputError, RecordError
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState, check_sequence, tailed_ratios

RECORD_VERSION: Final = 2
_MAGIC: Final = b"cedarWIN"
_HEADER: Final = struct.Struct("<8sH2x32s32sQQQQQI")  # magic to checksum, as `WindowHeader` lists them
_LIMIT: Final = 1 << 40


@dataclass(frozen=True, kw_only=True)
class WindowHeader:
    """What a record says of itself: whose it is, and the exact length it belongs to."""

    fingerprint: bytes
    shape: bytes
    length: int
    encoder_start: int
    decoder_start: int
    draft_start: int
    body_bytes: int
    checksum: int


def read_header(record: bytes | memoryview) -> WindowHeader:
    """The header of a record, its body not yet looked at.

    Raises RecordError when it is no record of this version.
    """
    if len(record) < _HEADER.size:
        raise RecordError("length", len(record), f"at least {_HEADER.size} bytes")
    magic, version, fingerprint, shape, length, encoder_start, decoder_start, draft_start, body, checksum = (
        _HEADER.unpack_from(record)
    )
    if magic != _MAGIC:
        raise RecordError("magic", magic, f"{_MAGIC!r}")
    if version != RECORD_VERSION:
        raise RecordError("version", version, f"{RECORD_VERSION}")
    if not max(encoder_start, decoder_start, draft_start) <= length <= _LIMIT or length == 0:
        raise RecordError(
            "starts and length",
            [encoder_start, decoder_start, draft_start, length],
            "starts at most length, length above 0",
        )
    return WindowHeader(
        fingerprint=fingerprint,
        shape=shape,
        length=length,
        encoder_start=encoder_start,
        decoder_start=decoder_start,
        draft_start=draft_start,
        body_bytes=body,
        checksum=checksum,
    )


def export_window(network: Network, memory: KVMemory, seq: SequenceState) -> bytes:
    """The record of `seq` at its present length.

    Raises InputError before its first token or inside a prefill.
    """
    check_sequence(seq, seq.length, memory, network.config, network.layout.page_tokens)
    if seq.length == 0:
        raise InputError("sequence length", 0, "above 0 to be recorded")
    if seq.tail is not None and seq.tail.waits(seq.length, network.config.layers):
        raise InputError("sequence", f"length {seq.length}", "finished: finish_prefill comes before a record")
    parts = [_ring_rows(network, memory, seq), *_tail_rows(network, memory, seq)]
    parts += [rows.flatten() for rows in _page_rows(network, memory, seq)]
    draft_start = seq.length if network.drafts is None else seq.draft_start
    if network.drafts is not None:
        parts.append(
            memory.draft_rings[seq.slot][:, _draft_slots(network, seq.length, draft_start)].flatten()
        )
    body = torch.cat([part.cpu() for part in parts]).numpy().tobytes()
    header = _HEADER.pack(
        _MAGIC,
        RECORD_VERSION,
        network.fingerprint,
        _shape(network),
        seq.length,
        seq.encoder_start,
        seq.decoder_start,
        draft_start,
        len(body),
        zlib.crc32(body),
    )
    return header + body


def import_window(network: Network, memory: KVMemory, seq: SequenceState, record: bytes | memoryview) -> None:
    """Restore a record into `seq`'s slot and last page, and set its length and window starts.

    `seq.ids` must begin with the ids that the record was made of, `seq.pages` cover its length, and the
    sealed pages below it hold their bytes already: that is for the caller to know. Raises RecordError when
    the record is damaged or another network's, InputError when the sequence has no room; nothing is changed
    then.
    """
    header = read_header(record)
    if header.fingerprint != network.fingerprint:
        raise RecordError(
            "fingerprint", header.fingerprint.hex(), f"this network's, {network.fingerprint.hex()}"
        )
    if header.shape != _shape(network):
        raise RecordError("shape", header.shape.hex(), "that of this network's rings, tails and pages")
    body = memoryview(record)[_HEADER.size :]
    if len(body) != header.body_bytes or zlib.crc32(body) != header.checksum:
        raise RecordError(
            "body", f"{len(body)} bytes", f"{header.body_bytes} bytes with the header's checksum"
        )
    restored = SequenceState(
        slot=seq.slot, pages=seq.pages, ids=seq.ids, images=seq.images, length=header.length
    )
    check_sequence(restored, header.length, memory, network.config, network.layout.page_tokens)
    reader = _Reader(body, memory.rings.device)
    rings, tails, pages = _targets(network, memory, restored)
    drafts = _draft_rows(network, memory, header)
    expected = sum(target.numel() * target.element_size() for target in (rings, *tails, *pages, drafts))
    if expected != len(body):
        raise RecordError("body", f"{len(body)} bytes", f"{expected} bytes at length {header.length}")
    ring_slots = _ring_slots(network, restored.length, memory.rings.device)
    memory.rings[seq.slot][:, ring_slots] = reader.take(rings)
    for target in tails:
        target.copy_(reader.take(target))
    for target in pages:
        target.copy_(reader.take(target))
    if network.drafts is not None:
        draft_slots = _draft_slots(network, header.length, header.draft_start)
        memory.draft_rings[seq.slot][:, draft_slots] = reader.take(drafts)
    seq.length, seq.write_from = header.length, 0
    seq.encoder_start, seq.decoder_start = header.encoder_start, header.decoder_start
    seq.draft_start = header.draft_start
    seq.tail = seq.decoder_from = None


def _ring_slots(network: Network, length: int, device: torch.device) -> torch.Tensor:
    """Ring slots int64 [min(n, W)] of the newest positions, oldest first."""
    window = network.config.window
    return torch.arange(max(0, length - window), length, device=device) % window


def _draft_slots(network: Network, length: int, start: int) -> torch.Tensor:
    """The same of a draft ring, int64 [min(n - draft start, W)]."""
    window = network.config.window
    return torch.arange(max(0, start, length - window), length, device=network.device) % window


def _draft_rows(network: Network, memory: KVMemory, header: WindowHeader) -> torch.Tensor:
    """A tensor shaped as the record's draft rings, whether this network drafts or not."""
    stages = 0 if network.config.draft is None else network.config.draft.stages
    rows = min(header.length - header.draft_start, network.config.window)
    return memory.rings.new_empty((stages, rows, window_row_bytes(network.config.head_dim)))


def _ring_rows(network: Network, memory: KVMemory, seq: SequenceState) -> torch.Tensor:
    rows = memory.rings[seq.slot][:, _ring_slots(network, seq.length, memory.rings.device)]
    oldest = seq.length - rows.shape[1]
    split = network.config.decoder_start_layer
    rows[:split, : max(0, seq.encoder_start - oldest)] = 0
    rows[split:, : max(0, seq.decoder_start - oldest)] = 0
    return rows.flatten()


def _tail_rows(network: Network, memory: KVMemory, seq: SequenceState) -> list[torch.Tensor]:
    return [view.contiguous().view(torch.uint8).flatten() for view in _tail_views(network, memory, seq)]


def _tail_views(network: Network, memory: KVMemory, seq: SequenceState) -> list[torch.Tensor]:
    ratios = tailed_ratios(network.config)
    return [memory.tails[seq.slot, i, :, : seq.length % ratio] for i, ratio in enumerate(ratios)]


def _page_rows(network: Network, memory: KVMemory, seq: SequenceState) -> list[torch.Tensor]:
    """Views of the rows so far, uint8 [rows, row_bytes], of every plane of the unsealed page."""
    tokens = seq.length % network.layout.page_tokens
    if tokens == 0:
        return []
    page = memory.pages[seq.pages[seq.length // network.layout.page_tokens]]
    views = []
    for source in network.layout.sources:
        rows = tokens // source.ratio
        for plane in source.planes:
            views.append(
                page[plane.offset : plane.offset + rows * plane.row_bytes].view(rows, plane.row_bytes)
            )
    return views


def _targets(
    network: Network, memory: KVMemory, seq: SequenceState
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Tensors shaped as in a record at `seq.length`; those of tails and page rows are the memory itself."""
    rows = min(seq.length, network.config.window)
    rings = memory.rings.new_empty((network.config.layers, rows, window_row_bytes(network.config.head_dim)))
    return rings, _tail_views(network, memory, seq), _page_rows(network, memory, seq)


def _shape(network: Network) -> bytes:
    """32 bytes that say which dimensions a record was made with."""
    config = network.config
    depth = len(tailed_ratios(config))
    numbers = (config.layers, config.window, config.head_dim, config.decoder_start_layer, depth)
    return struct.pack("<5I", *numbers) + struct.pack(
        "<IQ", network.layout.page_tokens, network.layout.page_bytes
    )


class _Reader:
    """Takes tensors off a record's body, front to back."""

    def __init__(self, body: memoryview, device: torch.device) -> None:
        self._bytes = (
            torch.frombuffer(bytearray(body), dtype=torch.uint8)
            if len(body)
            else torch.empty(0, dtype=torch.uint8)
        )
        self._device = device
        self._at = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """The next tensor, of the shape and dtype of `like`."""
        size = like.numel() * like.element_size()
        raw = self._bytes[self._at : self._at + size].clone()
        self._at += size
        return raw.view(like.dtype).view(like.shape).to(self._device)
