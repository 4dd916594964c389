"""``cedar model inspect``: what a network is, from its configuration and tensor headers alone."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from .exits import Exit
from .screen import console, count, emit_json, size, table

if TYPE_CHECKING:
    from cedar.model.plan import Inspection, NetworkPlan
    from cedar.model.plan import Size as StoredSize
    from rich.console import RenderableType


def inspect(path: str, *, page_tokens: int | None, as_json: bool) -> Exit:
    """Print the plan of the checkpoint or model preset ``path``; exit 1 when its tensors contradict it."""
    plan, found = read(path, page_tokens)
    if as_json:
        emit_json(as_record(plan, found), sys.stdout)
    else:
        screen = console()
        for part in as_tables(path, plan, found):
            screen.print(part)
    return Exit.FAILED if found is not None and found.problems else Exit.OK


def read(path: str, page_tokens: int | None) -> tuple[NetworkPlan, Inspection | None]:
    """The plan, and the comparison with the files unless ``path`` is a preset's name."""
    from cedar.cluster.config_load import load_model_preset, presets
    from cedar.model.config import parse_config
    from cedar.model.plan import inspect_checkpoint, network_plan

    if path in presets("models"):
        return network_plan(parse_config(json.dumps(load_model_preset(path))), page_tokens), None
    found = inspect_checkpoint(path, page_tokens)
    return found.plan, found


def as_record(plan: NetworkPlan, found: Inspection | None) -> dict[str, object]:
    """Everything, for programs."""
    record: dict[str, object] = {
        "config": asdict(plan.config),
        "layers": [{**asdict(layer), "mode": layer.mode.value} for layer in plan.layers],
        "decoder_start_layer": plan.decoder_start_layer,
        "page_tokens": plan.layout.page_tokens,
        "page_bytes": plan.layout.page_bytes,
        "page_sources": [asdict(source) for source in plan.layout.sources],
        "bytes_per_token": plan.bytes_per_token,
        "window_bytes": plan.window_bytes,
        "stages": {name: asdict(part) for name, part in plan.stages.items()},
        "parts": {name: asdict(part) for name, part in plan.parts.items()},
        "total": asdict(plan.total),
    }
    if found is not None:
        record["files"] = {
            "shards": list(found.shards),
            "bytes": found.file_bytes,
            "problems": list(found.problems),
            "unexpected": list(found.unexpected),
            "fingerprint": None if found.fingerprint is None else found.fingerprint.hex(),
        }
    return record


def as_tables(path: str, plan: NetworkPlan, found: Inspection | None) -> list[RenderableType]:
    """Tables for people."""
    config, layout = plan.config, plan.layout
    vision = "no vision" if config.vision is None else f"vision of {config.vision.layers} blocks"
    draft = "no draft module" if config.draft is None else f"{config.draft.stages} draft stages"
    head = (
        f"{path}: {config.model_type}, {count(plan.total.parameters)} parameters, "
        f"{size(plan.total.nbytes)} of tensors\n"
        f"{config.layers} layers (decoder from {plan.decoder_start_layer}), hidden {config.hidden_size}, "
        f"{config.heads} heads of {config.head_dim}, window {config.window}, "
        f"context {config.max_position_embeddings:,}; {vision}, {draft}\n"
        f"global KV: {plan.bytes_per_token:g} bytes a token; a page is {layout.page_tokens} tokens, "
        f"{layout.page_bytes:,} bytes; window state: {size(plan.window_bytes)} a sequence\n"
    )
    parts: list[RenderableType] = [head, layer_table(plan), page_table(plan)]
    parts.append(size_table("what each stage loads", plan.stages))
    parts.append(size_table("what it is made of", plan.parts))
    if found is not None:
        parts.append(files_text(found))
    return parts


def layer_table(plan: NetworkPlan) -> RenderableType:
    """One row a layer; neighbours with the same duties share one."""
    rows: list[list[object]] = []
    for layer in plan.layers:
        extras = [
            name
            for name, wanted in (
                ("engram", layer.has_engram),
                ("makes the candidate pool", layer.makes_candidates),
                ("selects within the pool", layer.uses_candidates),
                ("draft target", layer.draft_target),
            )
            if wanted
        ]
        sources = ["-" if source is None else source for source in (layer.kv_source, layer.index_source)]
        duties = [layer.mode.value, layer.ratio or "-", *sources, ", ".join(extras)]
        if rows and rows[-1][1:] == duties:
            rows[-1][0] = f"{str(rows[-1][0]).split('-')[0]}-{layer.layer}"
        else:
            rows.append([layer.layer, *duties])
    return table("layers", ("layer", "mode", "ratio", "KV from", "selection from", ""), rows, "rlrrrl")


def page_table(plan: NetworkPlan) -> RenderableType:
    """Sections of a page in order."""
    rows = [
        (source.layer, source.ratio, name, plane.offset, plane.rows, plane.row_bytes)
        for source in plan.layout.sources
        for name, plane in (
            ("main payload", source.main_payload),
            ("main scales", source.main_scales),
            ("index payload", source.index_payload),
            ("index scales", source.index_scales),
        )
    ]
    columns = ("source", "ratio", "section", "offset", "rows", "bytes a row")
    return table("a page", columns, rows, "rrlrrr")


def size_table(title: str, sizes: dict[str, StoredSize]) -> RenderableType:
    """Tensors, parameters and bytes of each part."""
    rows = [
        (name, f"{part.tensors:,}", count(part.parameters), size(part.nbytes)) for name, part in sizes.items()
    ]
    return table(title, ("", "tensors", "parameters", "bytes"), rows, "lrrr")


def files_text(found: Inspection) -> str:
    """The files on disk against the plan."""
    shards = f"{len(found.shards)} shard{'s' * (len(found.shards) != 1)}"
    lines = [f"files: {shards}, {size(found.file_bytes)}"]
    if found.fingerprint is not None:
        lines.append(f"every tensor is there with its shape; fingerprint {found.fingerprint.hex()}")
    lines += [f"problem: {problem}" for problem in found.problems]
    if found.unexpected:
        shown = ", ".join(found.unexpected[:5]) + (", ..." if len(found.unexpected) > 5 else "")
        lines.append(f"{len(found.unexpected)} tensors that no part of the network reads: {shown}")
    return "\n".join(lines)
