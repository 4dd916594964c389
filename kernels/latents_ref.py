"""Truth for the norms of attention's latents."""

from __future__ import annotations

import torch
from cedar.kernels import fp8_ref, norm_ref, rope_ref, wide_keys_ref


def norm_latents(
    latents: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    window: torch.Tensor,
    places: torch.Tensor,
    staging: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    """The query latent bf16 [N, Q]; the key's row written to window[places] where that is not negative.

    staging = (rings, sources, targets, saved), as `latents.Staging`. wide fp16 [M, D] takes what the window's
    rows [M, D + D/32] do, expanded.
    """
    queries = query_weight.shape[0]
    key = norm_ref.rms_norm(latents[:, queries:], key_weight, eps)
    rows = fp8_ref.pack_rows(rope_ref.turn(key.unsqueeze(1), *rope).squeeze(1))
    given = []
    if staging is not None:
        rings, sources, targets, saved = staging
        kept, moved = (torch.nonzero(index >= 0).squeeze(1) for index in (sources, targets))
        window[kept] = rings[sources[kept]]
        window[saved[moved]] = rings[targets[moved]]
        rings[targets[moved]] = rows[moved]
        given += [kept, saved[moved]]
    if bool((places < 0).any()):
        kept = torch.nonzero(places >= 0).squeeze(1)
        rows, places = rows[kept], places[kept]
    window[places.long()] = rows
    if wide is not None:
        every = torch.cat([*given, places.long()])
        wide[every] = wide_keys_ref.expand_window(window[every], wide.shape[1])
    return norm_ref.rms_norm(latents[:, :queries], query_weight, eps)
