"""Sampling parameters and tokens between the wire and the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cedar.actors.errors import InvalidRequest
from cedar.model.sampling_params import SamplingParams
from cedar.v1 import common_pb2
from cedar.v1.common_pb2 import TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from cedar.model.sampling import SampledToken


def model_sampling(wire: common_pb2.SamplingParams, vocabulary: int) -> SamplingParams:
    """The model's parameters from the wire's, where 0 means unset. SamplingError names a bad field.

    ``max_tokens`` must be set: stages reserve memory for it. Stop strings are the gateway's.
    """
    if wire.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", wire.max_tokens, "at least 1")
    for token in wire.stop_ids:
        if token >= vocabulary:
            raise InvalidRequest("sampling.stop_ids", token, f"below the vocabulary's size, {vocabulary}")
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p or 1.0,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        stop=tuple(wire.stop),
        stop_ids=tuple(wire.stop_ids),
        logprobs=wire.logprobs,
        ignore_eos=wire.ignore_eos,
    )


def stage_token(index: int, sampled: SampledToken) -> TokenEvent:
    """A sampled token as it goes on the wire, as number ``index`` of its request's output."""
    top = [TokenLogprob(id=token, logprob=logprob) for token, logprob in sampled.top]
    return TokenEvent(index=index, id=sampled.id, logprob=sampled.logprob, top=top)
