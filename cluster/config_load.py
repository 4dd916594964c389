"""Reads a configuration: YAML file or preset, overrides, and errors that say what was meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml
from cedar.cluster.config import ClusterConfig
from cedar.cluster.errors import ConfigError
from pydantic import BaseModel, ValidationError

RELATIVE_PATHS = (
    ("model", "path"),
    ("store", "directory"),
    ("store", "tls", "ca_file"),
    ("store", "tls", "certificate_file"),
    ("store", "tls", "key_file"),
    ("gateway", "auth", "api_keys_file"),
    ("gateway", "auth", "secret_file"),
)


def presets(kind: str = "clusters") -> list[str]:
    """Names of the presets of a kind: ``clusters`` or ``models``."""
    folder = resources.files("cedar.configs") / kind
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def preset_source(kind: str, name: str) -> Traversable:
    """The preset file. ``ConfigError`` names the presets there are when this is none of them."""
    if name not in presets(kind):
        raise ConfigError(f"{name!r} is no preset of {kind}{suggestion(name, presets(kind))}")
    return resources.files("cedar.configs") / kind / f"{name}.yaml"


def load_model_preset(name: str) -> dict[str, object]:
    """A model preset: the content of a ``config.json``."""
    origin = f"model preset {name}"
    return _mapping(_parsed(preset_source("models", name).read_text("utf-8"), origin), origin)


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The configuration in a YAML file, or the preset of that name, with ``path.to.field=value`` overrides.

    Relative paths in a file are taken from its folder; in overrides, from the working folder.
    Raises ``ConfigError`` that names the field, its value and what is allowed.
    """
    text = str(source)
    is_file = text.endswith((".yaml", ".yml")) or Path(text).exists()
    with resources.as_file(preset_source("clusters", text)) if not is_file else _existing(Path(text)) as file:
        try:
            data = _mapping(_parsed(file.read_text("utf-8"), text), text)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{text}: not YAML: byte {error.start} is not UTF-8") from None
        base = file.resolve().parent
    _anchor(data, base)
    for override in overrides:
        _apply(data, override)
    return parse_config(data, origin=text)


def parse_config(data: Mapping[str, object], origin: str = "configuration") -> ClusterConfig:
    """Validate a mapping. Raises ``ConfigError``."""
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in explain(error, ClusterConfig))) from None


def explain(error: ValidationError, model: type[BaseModel]) -> Iterable[str]:
    """One line for each problem, with the field's dotted path; unknown keys get a suggestion."""
    for problem in error.errors(include_url=False):
        location = tuple(str(part) for part in problem["loc"])
        path = ".".join(location)
        if problem["type"] == "extra_forbidden":
            known = list(_section(model, location[:-1]).model_fields)
            yield f"{path}: unknown key{suggestion(location[-1], known)}"
        elif problem["type"] == "missing":
            yield f"{path}: required, and not given"
        elif problem["type"] == "value_error":
            message = str(problem.get("ctx", {}).get("error", problem["msg"]))
            yield f"{path}.{message}" if path else message
        else:
            yield f"{path}: {problem['input']!r}: {problem['msg']}"


def suggestion(word: str, known: Sequence[str]) -> str:
    """What to say after a name that is none of ``known``: the nearest, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _section(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    names = iter(location)
    for name in names:
        annotation = model.model_fields[name].annotation
        if typing.get_origin(annotation) is dict:  # sections by a name of the user's
            next(names, None)
            annotation = typing.get_args(annotation)[1]
        inner = section_type(annotation)
        if inner is None:
            break
        model = inner
    return model


def section_type(annotation: object) -> type[BaseModel] | None:
    """The settings class behind a field's annotation, None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [section_type(part) for part in typing.get_args(annotation)]
        return next((part for part in found if part is not None), None)
    return None


class _existing:
    """Context of a plain file, to match ``resources.as_file``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Path:
        if not self.path.is_file():
            raise ConfigError(f"{self.path}: no such file; presets: {', '.join(presets())}")
        return self.path

    def __exit__(self, *error: object) -> None:
        return None


def _parsed(text: str, origin: str) -> object:
    """The YAML in ``text``; ``ConfigError`` names ``origin`` and the line."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{origin}: line {line}: not YAML: {words}") from None
    except yaml.YAMLError as error:  # a character that YAML has no place for
        words = getattr(error, "reason", type(error).__name__)
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise ConfigError(f"{origin}: line {line}: not YAML: {words}") from None


def _mapping(data: object, origin: str) -> dict[str, object]:
    if data is None:
        raise ConfigError(f"{origin}: empty file; a mapping of names to values is needed")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{origin}: a mapping of names to values is needed, not {type(data).__name__}")
    return data


def _anchor(data: dict[str, object], base: Path) -> None:
    for path in RELATIVE_PATHS:
        section: object = data
        for name in path[:-1]:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            value = section.get(path[-1])
            if isinstance(value, str) and "://" not in value and not Path(value).is_absolute():
                section[path[-1]] = str((base / Path(value).expanduser()).resolve())


def _apply(data: dict[str, object], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"override {override!r}: write it as section.field=value")
    *sections, field = path.split(".")
    section = data
    for name in sections:
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {name} is a value, not a section")
        section = inner
    section[field] = _parsed(text, f"override {override!r}")
