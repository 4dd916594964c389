"""Packed pages in and out of a memory's tensor, as bytes. Used from the loop's thread.

A slot is written only by its one lease holder, before it is sealed or named to the engine; sealed slots do
not change. So copies here need no lock against the network that runs on its own thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class PageMemory:
    """The bytes of the pages of one ``KVMemory``: ``pages`` is uint8 ``[P, page_bytes]``."""

    def __init__(self, pages: Tensor) -> None:
        self._tensor = pages
        self._array = pages.numpy() if pages.device.type == "cpu" else None
        self.page_bytes = int(pages.shape[1])

    def read(self, slot: int) -> bytes:
        """A copy of one page."""
        if self._array is not None:
            return bytes(self._array[slot])
        return bytes(self._tensor[slot].cpu().numpy())

    def write(self, slot: int, payload: bytes | memoryview) -> None:
        """Overwrite one page. ValueError when ``payload`` is not exactly a page."""
        if len(payload) != self.page_bytes:
            raise ValueError(f"page payload={len(payload)} bytes: must be {self.page_bytes}")
        source = np.frombuffer(payload, dtype=np.uint8)
        if self._array is not None:
            self._array[slot] = source
        else:
            import torch

            self._tensor[slot].copy_(torch.from_numpy(source.copy()))
