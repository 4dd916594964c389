"""What a request may ask for, checked once, before any work is spent. Pure.

Each refusal names the field, its value and the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from cedar.cluster.config import ClusterConfig
from cedar.cluster.errors import CallerError
from cedar.cluster.hits import pages_needed
from cedar.v1 import common_pb2 as common
from cedar.v1 import generation_pb2 as generation


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``context_tokens``: the model's. ``pages``: in the smaller of a Prefill's and a Decode's memory."""

    prompt_tokens: int
    images: int
    image_bytes: int
    output_tokens: int
    default_output_tokens: int
    context_tokens: int
    page_tokens: int
    prefill_pages: int
    decode_pages: int


def limits_of(config: ClusterConfig, context_tokens: int, page_tokens: int) -> Limits:
    """The configuration's limits, and the model's."""
    gateway = config.gateway
    return Limits(
        prompt_tokens=min(gateway.max_prompt_tokens, context_tokens),
        images=gateway.max_images,
        image_bytes=gateway.max_image_bytes,
        output_tokens=gateway.max_output_tokens,
        default_output_tokens=gateway.default_output_tokens,
        context_tokens=context_tokens,
        page_tokens=page_tokens,
        prefill_pages=config.prefill.pages,
        decode_pages=config.decode.pages,
    )


def check_images(request: generation.GenerateRequest, limits: Limits) -> None:
    """Number and size of the encoded images, before one is decoded."""
    images = [("images", image) for image in request.images]
    for message_index, message in enumerate(request.conversation.messages):
        for part_index, part in enumerate(message.content):
            if part.HasField("image"):
                path = f"conversation.messages[{message_index}].content[{part_index}].image"
                images.append((path, part.image))
    if len(images) > limits.images:
        raise CallerError("images", len(images), f"at most {limits.images}")
    for index, (path, image) in enumerate(images):
        field = f"images[{index}]" if path == "images" else path
        if len(image) > limits.image_bytes:
            raise CallerError(field, f"{len(image)} bytes", f"at most {limits.image_bytes} bytes")


def admitted_sampling(
    prompt_tokens: int, asked: common.SamplingParams, limits: Limits
) -> common.SamplingParams:
    """The sampling parameters with ``max_tokens`` set: as asked, or the default, within the context.

    Raises ``CallerError`` for a prompt or an answer that is too long.
    """
    if prompt_tokens > limits.prompt_tokens:
        raise CallerError("prompt", f"{prompt_tokens} tokens", f"at most {limits.prompt_tokens} tokens")
    if prompt_tokens >= limits.context_tokens:
        raise CallerError(
            "prompt", f"{prompt_tokens} tokens", f"below the context of {limits.context_tokens} tokens"
        )
    if asked.max_tokens > limits.output_tokens:
        raise CallerError("sampling.max_tokens", asked.max_tokens, f"at most {limits.output_tokens}")
    room = limits.context_tokens - prompt_tokens
    sampling = common.SamplingParams()
    sampling.CopyFrom(asked)
    sampling.max_tokens = min(asked.max_tokens or limits.default_output_tokens, room)
    _check_memory(prompt_tokens, sampling.max_tokens, limits)
    return sampling


def _check_memory(prompt_tokens: int, max_tokens: int, limits: Limits) -> None:
    prompt_pages = pages_needed(prompt_tokens, 0, limits.page_tokens)
    if prompt_pages > limits.prefill_pages:
        raise CallerError(
            "prompt", f"{prompt_tokens} tokens", f"prefill.pages: {limits.prefill_pages} hold fewer"
        )
    pages = pages_needed(prompt_tokens, max_tokens, limits.page_tokens)
    if pages > limits.decode_pages:
        raise CallerError(
            "sampling.max_tokens",
            max_tokens,
            f"with a prompt of {prompt_tokens} tokens {pages} pages; decode.pages: {limits.decode_pages}",
        )
