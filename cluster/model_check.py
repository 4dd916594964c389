"""What a configuration says of its model, judged before anything starts: preset, page size, checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from cedar.cluster.config import ClusterConfig
from cedar.cluster.config_load import load_model_preset, presets, suggestion
from cedar.cluster.errors import ConfigError

_DRAFT_FIELDS = ("text_config.num_nextn_predict_layers", "text_config.dspark_target_layer_ids")


def check_model(config: ClusterConfig) -> str | None:
    """Judge ``config.model``: the preset exists, the page size fits the network, and a checkpoint that can
    be read here is a model, and the one that the preset names.

    Returns None when the checkpoint's ``config.json`` was read, else why it was not: a URL, or no such
    folder on this machine. Raises ``ConfigError`` that names the field, its value and the limit.
    """
    model = config.model
    expected: Mapping[str, object] | None = None
    if model.preset is not None:
        if model.preset not in presets("models"):
            hint = suggestion(model.preset, presets("models"))
            raise ConfigError(f"model.preset: {model.preset!r} is no model preset{hint}")
        expected = load_model_preset(model.preset)
        _check_network(expected, config, f"model preset {model.preset}")
    if "://" in model.path:
        return f"the checkpoint at {model.path} was not read"
    if not model.path:
        return "no checkpoint named (model.path is empty)"
    folder = Path(model.path)
    if not folder.exists():
        return f"no checkpoint at {folder} (model.path) on this machine"
    file = folder / "config.json"
    if not file.is_file():
        raise _no_checkpoint(config)
    found = _read(file)
    if expected is not None:
        for path, wanted, actual in _differences(expected, found):
            raise ConfigError(
                f"model.preset: {model.preset}, but {file}: {path} is {actual!r}, not {wanted!r}"
            )
    _check_network(found, config, str(file))
    return None


def check_checkpoint(config: ClusterConfig) -> None:
    """``check_model`` for a start: a checkpoint that is no URL must be there, too. Raises ``ConfigError``."""
    if check_model(config) is not None and "://" not in config.model.path:
        raise _no_checkpoint(config)


def _no_checkpoint(config: ClusterConfig) -> ConfigError:
    return ConfigError(
        f"model.path: {config.model.path or 'empty'} (a checkpoint folder with a config.json is needed; "
        "say where yours is with --set model.path=/path/to/checkpoint)"
    )


def _read(file: Path) -> Mapping[str, object]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {file}: a JSON object is needed, not {type(found).__name__}")
    return found


def _check_network(found: Mapping[str, object], config: ClusterConfig, origin: str) -> None:
    from cedar.actors.errors import ConfigError as ModelFault
    from cedar.actors.prompts import check_network

    try:
        check_network(found, config.model.page_tokens, drafting=config.decode.drafting)
    except ModelFault as fault:
        if fault.field == "page_tokens":
            raise ConfigError(f"model.page_tokens: {fault.value} ({fault.limit}; {origin})") from None
        if fault.field in _DRAFT_FIELDS:
            raise ConfigError(f"decode.drafting: true, but {origin}: {fault}") from None
        raise ConfigError(f"model.path: {origin}: {fault}") from None


def _differences(
    expected: Mapping[str, object], actual: Mapping[str, object], prefix: str = ""
) -> Iterable[tuple[str, object, object]]:
    for name, value in expected.items():
        other = actual.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differences(value, other, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}", value, other
