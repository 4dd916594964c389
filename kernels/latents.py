"""What attention makes of its two latents: the normed query latent, and the window key where it is kept (spec
§3).

One launch on a GPU: both norms, RoPE of the key, its FP8 row into the ring, and the query latent as the
products after it meet it. A chunk's keys go to a staging buffer, beside what the rings held before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from cedar.kernels import latents_ref, paging_ref, prepared_ref
from cedar.kernels.contract import Contract
from cedar.kernels.fp8 import window_row_bytes
from cedar.kernels.fp8_ref import GROUP
from cedar.kernels.paging import INDEX_TYPES
from cedar.kernels.prepared import Prepared


class Staging(NamedTuple):
    """The part of a staging buffer that rings fill, for a chunk that is to overwrite some of their rows.

    Row j of the buffer is row sources[j] of `rings`, as it was before the call. Row n of the chunk goes to
    ring row targets[n] as well, unless that is negative: then saved[n] is the row of the buffer whose source
    that is, and sources[saved[n]] is -1, because one program moves both.
    """

    rings: torch.Tensor  # uint8 [P, D + D/32]
    sources: torch.Tensor  # int64 [K], -1: moved with the chunk's row that replaces it
    targets: torch.Tensor  # int64 [N], -1: the chunk's row goes to the buffer alone
    saved: torch.Tensor  # int64 [N]


def norm_latents(
    latents: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    window: torch.Tensor,
    places: torch.Tensor,
    orders: tuple[int, ...] = (),
    staging: Staging | None = None,
    wide: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[Prepared, ...]]:
    """Norms latents bf16 [N, Q + D]; returns the query latent bf16 [N, Q], also quantised in each of
    `orders`.

    query_weight bf16 [Q], key_weight bf16 [D]; rope = (cos, sin) fp32 [N, R/2]. The key goes to row
    places[n], int [N], of window uint8 [M, D + D/32], in place; a negative place is not written. `staging`
    fills the window's first rows from rings, and writes the rings. Every row that the window is given goes to
    `wide` fp16 [M, D] as well, expanded (`wide_keys`). An index out of range raises
    PageRangeError (CPU; on a GPU with CEDAR_CHECK_INDICES=1, else nothing is read or written there).
    """
    c = Contract("norm_latents", Q=query_weight.shape[0], D=key_weight.shape[0])
    c.dims |= {"width": c.dims["Q"] + c.dims["D"], "row": window_row_bytes(c.dims["D"])}
    c.expect("latents", latents, "N width", torch.bfloat16)
    c.expect("query_weight", query_weight, "Q", torch.bfloat16)
    c.expect("key_weight", key_weight, "D", torch.bfloat16)
    c.expect("rope cos", rope[0], "N F", torch.float32)
    c.expect("rope sin", rope[1], "N F", torch.float32)
    c.expect("window", window, "M row", torch.uint8)
    c.expect("places", places, "N", *INDEX_TYPES)
    c.divisible("key_weight", "D", GROUP)
    c.divisible("query_weight", "Q", GROUP)
    c.require("rope cos", 2 * c.dims["F"] <= c.dims["D"], "turns more channels than the key has")
    c.require("window", window.is_contiguous(), "must be contiguous")
    paging_ref.check_range("places", places, -(1 << 31), window.shape[0])
    if wide is not None:
        c.expect("wide", wide, "M D", torch.float16)
        c.require("wide", wide.is_contiguous(), "must be contiguous")
    if staging is not None:
        c.expect("staging.rings", staging.rings, "P row", torch.uint8)
        c.expect("staging.sources", staging.sources, "K", torch.int64)
        c.expect("staging.targets", staging.targets, "N", torch.int64)
        c.expect("staging.saved", staging.saved, "N", torch.int64)
        c.require("staging.rings", staging.rings.is_contiguous(), "must be contiguous")
        c.require("staging.sources", staging.sources.shape[0] <= window.shape[0], "has more rows than window")
        paging_ref.check_range("staging.sources", staging.sources, -(1 << 31), staging.rings.shape[0])
        paging_ref.check_range("staging.targets", staging.targets, -(1 << 31), staging.rings.shape[0])
        paging_ref.check_range("staging.saved", staging.saved, 0, window.shape[0])
    if latents.is_cuda and c.dims["D"].bit_count() == 1:
        from cedar.kernels import latents_triton

        return latents_triton.norm_latents(
            latents, query_weight, key_weight, rope, eps, window, places, orders, staging, wide
        )
    query = latents_ref.norm_latents(
        latents, query_weight, key_weight, rope, eps, window, places, staging, wide
    )
    return query, tuple(prepared_ref.prepared(query, order) for order in orders)
