"""What a request may ask of the sampler, checked. Standard library only."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cedar.model.prompt_errors import SamplingError

MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling. Fractions are kept as float32, as on the wire. Raises `SamplingError`.

    `temperature` 0 takes the likeliest token. `top_k` 0 and `top_p` 1 filter nothing; `min_p` keeps tokens
    at least that fraction as likely as the likeliest. `max_tokens` None means up to the context's end.
    Generation ends at a token of `stop_ids`, at the end token unless `ignore_eos`, or where a string of
    `stop` is complete. `logprobs` is how many alternatives are reported beside each token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _fraction("temperature", self.temperature, 0.0, 100.0))
        object.__setattr__(self, "top_p", _fraction("top_p", self.top_p, 0.0, 1.0))
        object.__setattr__(self, "min_p", _fraction("min_p", self.min_p, 0.0, 1.0))
        if self.top_p == 0:
            raise SamplingError("top_p", self.top_p, "above 0 and at most 1")
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("seed", self.seed, 0, 2**64 - 1)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if len(self.stop_ids) > MAX_STOPS:
            raise SamplingError("stop_ids", len(self.stop_ids), f"at most {MAX_STOPS} ids")
        for token_id in self.stop_ids:
            _integer("stop_ids", token_id, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without a draw."""
        return self.temperature == 0


def _fraction(field: str, value: float, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise SamplingError(field, value, f"a number from {low:g} to {high:g}")
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _integer(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SamplingError(field, value, f"an integer from {low} to {high}")


def _stops(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        raise SamplingError("stop", stop, "a sequence of strings")
    if len(stop) > MAX_STOPS:
        raise SamplingError("stop", len(stop), f"at most {MAX_STOPS} strings")
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise SamplingError("stop", text, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stop)
