"""The network: config, checkpoint, layers, tokenizer, chat encoding, images, sampling. Pure torch.

`load_network(path, device="cpu", stage=None)` is the way in; it is imported when first asked for, so that
modules which need no torch stay cheap to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedar.model.loading import load_network

__all__ = ["load_network"]


def __getattr__(name: str) -> Any:
    if name == "load_network":
        from cedar.model.loading import load_network

        return load_network
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
