"""A network with the memory that one engine owns, and the numbers that decisions need of it.

Everything here except ``pages`` runs on the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cedar.actors.errors import Corrupt
from cedar.actors.page_memory import PageMemory
from cedar.actors.scheduler import Model

if TYPE_CHECKING:
    from cedar.model.network import Network
    from cedar.model.state import KVMemory, SequenceState


@dataclass(frozen=True)
class WindowState:
    """A window record, and what its header says."""

    data: bytes
    length: int
    encoder_start: int
    decoder_start: int


@dataclass(frozen=True)
class NetworkMemory:
    """One engine's network, its tensors, and its pages as bytes."""

    network: Network
    kv: KVMemory
    pages: PageMemory
    model: Model

    @classmethod
    def load(
        cls,
        checkpoint: str,
        *,
        stage: str,
        device: str,
        page_tokens: int | None,
        pages: int,
        slots: int,
        drafting: bool = False,
        network: Network | None = None,
    ) -> NetworkMemory:
        """Load the stage's part of a checkpoint (or take a loaded ``network``) and allocate its memory."""
        from cedar.model import load_network

        if network is None:
            network = load_network(
                checkpoint, device=device, stage=stage, page_tokens=page_tokens, drafting=drafting
            )
        config = network.config
        kv = network.allocate(pages=pages, slots=slots)
        model = Model(
            page_tokens=network.layout.page_tokens,
            window=config.window,
            encoder_layers=config.decoder_start_layer,
            context=config.max_position_embeddings,
            eos=config.eos_token_id,
        )
        return cls(network, kv, PageMemory(kv.pages), model)

    @property
    def state_limit_bytes(self) -> int:
        """More than any window record of this network takes."""
        slots, layers = self.kv.rings.shape[:2]
        draft = self.network.config.draft
        rings = self.kv.rings.nbytes // slots
        drafts = (
            rings // layers * (0 if draft is None else draft.stages)
        )  # a peer may draft, though this does not
        return int(rings + drafts + self.kv.tails.nbytes // slots) + self.pages.page_bytes + (64 << 10)

    def record_header(self, record: bytes) -> WindowState | None:
        """What a record says of itself; None when it is no record of this network. Any thread."""
        from cedar.model.errors import RecordError
        from cedar.model.window_record import read_header

        try:
            header = read_header(record)
        except RecordError:
            return None
        if header.fingerprint != self.network.fingerprint:
            return None
        return WindowState(record, header.length, header.encoder_start, header.decoder_start)

    def export(self, state: SequenceState) -> bytes:
        """The sequence's window record."""
        from cedar.model.window_record import export_window

        return export_window(self.network, self.kv, state)

    def restore(self, state: SequenceState, record: bytes) -> None:
        """Bring a window record into the sequence's slot and last page. Corrupt when it does not fit."""
        from cedar.model.errors import RecordError
        from cedar.model.window_record import import_window

        try:
            import_window(self.network, self.kv, state, record)
        except RecordError as error:
            raise Corrupt(str(error)) from None
