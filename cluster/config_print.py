"""Prints configurations: the effective one, and the table of every knob for the documentation."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml
from cedar.cluster.config import ClusterConfig
from cedar.cluster.config_load import section_type
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True)
class Knob:
    """One setting. ``type`` and ``default`` as text."""

    path: str
    type: str
    default: str
    description: str


def effective_yaml(config: ClusterConfig) -> str:
    """Everything, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def json_schema() -> dict[str, object]:
    """JSON schema of the configuration file."""
    return ClusterConfig.model_json_schema()


def knobs(model: type[BaseModel] = ClusterConfig, prefix: str = "") -> Iterator[Knob]:
    """Every setting, depth first, in the order of the file."""
    for name, field in model.model_fields.items():
        inner = section_type(field.annotation)
        if inner is not None:
            yield from knobs(inner, f"{prefix}{name}.")
        else:
            yield Knob(
                prefix + name, _type(field), _default(field), " ".join((field.description or "").split())
            )


def knobs_markdown() -> str:
    """The table of every knob."""
    rows = [f"| `{k.path}` | {k.type} | {k.default} | {k.description} |" for k in knobs()]
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _type(field: FieldInfo) -> str:
    return " ".join([_type_text(field.annotation), *_bounds(field.metadata)])


def _type_text(annotation: object) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is dict:
        return "settings by name" if section_type(parts[1]) else f"{_type_text(parts[1])} by name"
    if origin is typing.Annotated:
        inner = parts[1].metadata if isinstance(parts[1], FieldInfo) else parts[1:]
        return " ".join([_type_text(parts[0]), *_bounds(inner)])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(part) for part in parts if part is not type(None))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _bounds(metadata: Sequence[object]) -> list[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [
        f"{sign} {getattr(limit, name)}"
        for limit in metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "unset" if field.default in (None, "") else f"`{field.default}`"
