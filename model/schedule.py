"""Which layer does what: modes and sources, from the ratio list and the two source lists (spec §1).

A layer with ratio 0 attends to its window only. A compressed layer is *Full* when it produces global entries
and index keys of its own, *Reindex* when it selects anew among those of the nearest producer at or below it,
and *Reuse* when it reads the selection of the nearest selecting layer at or below it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from cedar.kvstore.layout import LayoutError, PageLayout
from cedar.model.config import DraftConfig, ModelConfig
from cedar.model.config_fields import check_layer_list
from cedar.model.errors import ConfigError


class LayerMode(enum.Enum):
    """What a layer does about global entries."""

    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer's place in the schedule. Sources are layer numbers, None for a window-only layer."""

    layer: int
    mode: LayerMode
    ratio: int
    kv_source: int | None
    index_source: int | None
    uses_candidates: bool
    makes_candidates: bool
    has_engram: bool
    draft_target: bool

    @property
    def selects(self) -> bool:
        """Whether the layer scores index keys itself."""
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)


_FIELD: Final = "text_config."


def layer_plan(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of every backbone layer.

    Raises ConfigError when the schedule is impossible, naming the field.
    """
    _check_lists(config)
    engram_layers = config.engram.layer_ids if config.engram else ()
    targets = config.draft.target_layer_ids if config.draft else ()
    plans: list[LayerPlan] = []
    kv_source: int | None = None
    index_source: int | None = None
    for layer in range(config.layers):
        ratio = config.compress_ratios[layer]
        if layer in config.kv_source_layer_ids:
            kv_source = layer
        if layer in config.index_source_layer_ids:
            index_source = layer
        mode = _mode(config, layer, ratio, kv_source)
        compressed = mode is not LayerMode.SWA
        plans.append(
            LayerPlan(
                layer=layer,
                mode=mode,
                ratio=ratio,
                kv_source=kv_source if compressed else None,
                index_source=index_source if compressed else None,
                uses_candidates=_uses_candidates(config, layer, mode, kv_source),
                makes_candidates=layer == config.candidate_source_layer_id,
                has_engram=layer in engram_layers,
                draft_target=layer in targets,
            )
        )
    return tuple(plans)


def default_page_tokens(config: ModelConfig) -> int:
    """Tokens of a page when nobody says otherwise: two windows (256 for flash)."""
    return 2 * config.window


def page_layout(config: ModelConfig, page_tokens: int | None = None) -> PageLayout:
    """The page format of this network.

    Raises ConfigError when `page_tokens` fits no whole groups of a source.
    """
    tokens = default_page_tokens(config) if page_tokens is None else page_tokens
    sources = [(layer, config.compress_ratios[layer]) for layer in config.kv_source_layer_ids]
    try:
        return PageLayout.build(
            sources=sources,
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            page_tokens=tokens,
        )
    except LayoutError as error:
        raise ConfigError(error.field, error.value, error.allowed) from error


def check_drafting(config: ModelConfig) -> DraftConfig:
    """The draft module's config. Raises ConfigError when there is none, or it cannot be kept in step.

    Its rings are made from rows that have run the decoder: with taps below, a prompt's last rows would need
    them, and CED prefill does not keep what is below.
    """
    draft, first = config.draft, config.decoder_start_layer
    if draft is None:
        raise ConfigError("text_config.num_nextn_predict_layers", 0, "above 0 to draft tokens")
    if min(draft.target_layer_ids) < first:
        field = "text_config.dspark_target_layer_ids"
        raise ConfigError(field, list(draft.target_layer_ids), f"in the decoder, from {first} on, to draft")
    return draft


def can_draft(config: ModelConfig) -> bool:
    """Whether there is a draft module that can be kept in step."""
    return config.draft is not None and min(config.draft.target_layer_ids) >= config.decoder_start_layer


def _mode(config: ModelConfig, layer: int, ratio: int, kv_source: int | None) -> LayerMode:
    produces = layer in config.kv_source_layer_ids
    selects = layer in config.index_source_layer_ids
    if ratio == 0:
        for listed, name in ((produces, "kv_source_layer_ids"), (selects, "index_source_layer_ids")):
            if listed:
                raise ConfigError(
                    f"{_FIELD}{name}",
                    layer,
                    f"a layer whose ratio in compress_ratios is above 0, not {layer}",
                )
        return LayerMode.SWA
    if kv_source is None:
        first = config.kv_source_layer_ids[0]
        raise ConfigError(
            f"{_FIELD}compress_ratios[{layer}]",
            ratio,
            f"0: layer {layer} is below every key/value source, first {first}",
        )
    source_ratio = config.compress_ratios[kv_source]
    if ratio != source_ratio:
        raise ConfigError(
            f"{_FIELD}compress_ratios[{layer}]",
            ratio,
            f"{source_ratio}, the ratio of its key/value source {kv_source}",
        )
    if produces:
        return LayerMode.FULL
    return LayerMode.REINDEX if selects else LayerMode.REUSE


def _uses_candidates(config: ModelConfig, layer: int, mode: LayerMode, kv_source: int | None) -> bool:
    source = config.candidate_source_layer_id
    if mode is not LayerMode.REINDEX or source is None or layer < source:
        return False
    if kv_source != source:
        raise ConfigError(
            f"{_FIELD}candidate_source_layer_id",
            source,
            f"the key/value source that layer {layer} selects from, {kv_source}",
        )
    return True


def _check_lists(config: ModelConfig) -> None:
    stages = config.draft.stages if config.draft else 0
    expected = config.layers + stages
    ratios = config.compress_ratios
    if len(ratios) != expected:
        raise ConfigError(
            f"{_FIELD}compress_ratios",
            list(ratios),
            f"{expected} long (num_hidden_layers + num_nextn_predict_layers {stages}), not {len(ratios)}",
        )
    for layer, ratio in enumerate(ratios):
        limit = config.window if layer < config.layers else 0
        if not 0 <= ratio <= limit:
            what = (
                "sliding_window" if layer < config.layers else "0: a draft layer attends to its window only"
            )
            raise ConfigError(f"{_FIELD}compress_ratios[{layer}]", ratio, f"from 0 to {limit}, {what}")
    check_layer_list(f"{_FIELD}kv_source_layer_ids", config.kv_source_layer_ids, config.layers)
    check_layer_list(f"{_FIELD}index_source_layer_ids", config.index_source_layer_ids, config.layers)
    for layer in config.kv_source_layer_ids:
        if layer not in config.index_source_layer_ids:
            raise ConfigError(
                f"{_FIELD}kv_source_layer_ids",
                layer,
                f"in index_source_layer_ids {list(config.index_source_layer_ids)}",
            )
    _check_candidates(config)


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    if source is None:
        return
    field = f"{_FIELD}candidate_source_layer_id"
    if source not in config.index_source_layer_ids:
        raise ConfigError(field, source, f"in index_source_layer_ids {list(config.index_source_layer_ids)}")
    if source not in config.kv_source_layer_ids:
        raise ConfigError(field, source, f"in kv_source_layer_ids {list(config.kv_source_layer_ids)}")
