"""Typed reads from one decoded JSON object; every refusal names the field by its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from cedar.model.errors import ConfigError

_MISSING: Final = object()
_NO_LIMIT: Final = 2**40
_LARGEST: Final = 1e300


class Fields:
    """Typed reads from one JSON object; every refusal names the field by its path."""

    def __init__(self, data: Mapping[str, Any], path: str) -> None:
        self._data = data
        self._path = path

    def name(self, key: str) -> str:
        """The field's path, as errors print it."""
        return f"{self._path}{key}"

    def absent(self, key: str) -> bool:
        """Whether the field is missing or null."""
        return self._data.get(key) is None

    def section(self, key: str) -> Fields:
        """A nested object."""
        value = self._data.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(self.name(key), "missing" if value is None else value, "an object")
        return Fields(value, f"{self.name(key)}.")

    def fixed(self, key: str, expected: object) -> None:
        """Refuse any value but `expected`, which is also what a missing field means."""
        value = self._data.get(key, _MISSING)
        if value is not _MISSING and (
            value != expected or isinstance(value, bool) != isinstance(expected, bool)
        ):
            raise ConfigError(self.name(key), value, f"{expected!r}")

    def text(self, key: str) -> str:
        """A string."""
        value = self._required(key)
        if not isinstance(value, str):
            raise ConfigError(self.name(key), value, "a string")
        return value

    def count(self, key: str, *, least: int = 1, most: int = _NO_LIMIT) -> int:
        """An integer from `least` to `most`."""
        value = self._required(key)
        if not _is_integer(value) or not least <= value <= most:
            limit = f"of at least {least}" if most == _NO_LIMIT else f"from {least} to {most}"
            raise ConfigError(self.name(key), value, f"an integer {limit}")
        return int(value)

    def optional_count(self, key: str) -> int | None:
        """An integer of at least 0, None when absent."""
        return None if self.absent(key) else self.count(key, least=0)

    def index(self, key: str, size: int) -> int:
        """An integer from 0 to `size` - 1."""
        return self.count(key, least=0, most=size - 1)

    def multiple(self, key: str, of: int) -> int:
        """A positive multiple of `of`."""
        value = self.count(key)
        if value % of:
            raise ConfigError(self.name(key), value, f"a multiple of {of}")
        return value

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise ConfigError(self.name(key), value, "a finite number above 0")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        value = self._required(key)
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(_is_integer, value)):
            raise ConfigError(self.name(key), value, "a list of integers")
        return tuple(value)

    def ascending(self, key: str, layers: int) -> tuple[int, ...]:
        """A list of layers below `layers`, strictly ascending and not empty."""
        values = self.integers(key)
        check_layer_list(self.name(key), values, layers)
        return values

    def _required(self, key: str) -> Any:
        value = self._data.get(key)
        if value is None:
            raise ConfigError(self.name(key), "missing", "given")
        return value


def check_layer_list(field: str, values: Sequence[int], layers: int) -> None:
    """Refuse a list of layers that is empty, not strictly ascending, or names a layer that does not exist."""
    if not values:
        raise ConfigError(field, list(values), "at least one layer")
    if any(not 0 <= value < layers for value in values):
        raise ConfigError(field, list(values), f"layers from 0 to {layers - 1}")
    if any(b <= a for a, b in pairwise(values)):
        raise ConfigError(field, list(values), "strictly ascending")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
