"""Decoding under limits, planned sizes, patches and content hashes."""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cedar.model.config import VisionConfig, parse_config
from cedar.model.images import (
    ImageLimits,
    content_hash,
    decode_image,
    describe_image,
    plan_image,
    prepare_image,
    span_length,
    token_types,
)
from cedar.model.prompt_errors import ImageError
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
TINY = parse_config((GOLDEN / "config.json").read_bytes()).vision
PICTURE = (GOLDEN / "image.png").read_bytes()
FLASH = VisionConfig(
    layers=32,
    hidden_size=1024,
    heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
    max_wh_ratio=None,
)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(mode: str, size: tuple[int, int] = (20, 12)) -> Image.Image:
    depth = {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2, "L": 1}[mode]
    pixels = np.random.default_rng(5).integers(0, 256, (size[1], size[0], depth), dtype=np.uint8)
    return Image.frombytes(mode, size, pixels.tobytes())


def test_golden_patches_and_grid():
    expected = load_file(GOLDEN / "expected.safetensors")
    prepared = prepare_image(PICTURE, TINY)
    assert prepared.patches.dtype == torch.bfloat16
    assert torch.equal(prepared.patches, expected["image/patches"])
    assert list(prepared.plan.grid) == expected["image/grid"].tolist()
    assert prepared.plan.span_length == int((expected["image/token_types"] >= 0).sum())
    described = describe_image(PICTURE, TINY)
    assert (described.plan, described.content_hash) == (prepared.plan, prepared.content_hash)


def test_golden_token_types():
    types = load_file(GOLDEN / "expected.safetensors")["image/token_types"][0]
    plan = plan_image(150, 100, TINY)
    assert token_types(plan.rows, plan.columns) == types[types >= 0].tolist()


@given(st.integers(1, 40), st.integers(1, 40))
def test_span_length_counts_token_types(rows, columns):
    types = token_types(rows, columns)
    assert len(types) == span_length(rows, columns)
    assert [types.count(kind) for kind in range(4)] == [1, rows * columns, rows, 1]


@pytest.mark.parametrize(
    ("size", "planned", "tokens"),
    [
        ((544, 544), (546, 546), (13, 13)),  # min_pixels exactly: only rounded up
        ((100, 100), (546, 546), (13, 13)),  # scaled up to 544
        ((1280, 853), (1288, 854), (21, 31)),
        ((1, 1), (546, 546), (13, 13)),
        ((4000, 3000), (1512, 1134), (27, 36)),  # shrunk to 36 columns
        ((10, 100_000), (42, 21_462), (511, 1)),  # one column
        ((100_000, 10), (42_882, 42), (1, 1021)),  # one row
    ],
)
def test_planned_sizes(size, planned, tokens):
    plan = plan_image(*size, FLASH)
    assert ((plan.width, plan.height), (plan.rows, plan.columns)) == (planned, tokens)
    assert plan.span_length <= FLASH.max_image_tokens


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([TINY, FLASH]))
def test_every_plan_fits_and_keeps_the_aspect(width, height, vision):
    plan = plan_image(width, height, vision)
    assert plan.span_length <= vision.max_image_tokens
    assert (plan.width % 14, plan.height % 14) == (0, 0)
    assert plan.grid == (
        plan.height // 14,
        plan.width // 14,
        math.ceil(plan.height / 42),
        math.ceil(plan.width / 42),
    )
    if min(plan.rows, plan.columns) > 3:
        assert math.isclose(plan.width / plan.height, width / height, rel_tol=0.2)


def test_a_side_ratio_above_the_config_is_refused():
    narrow = dataclasses.replace(FLASH, max_wh_ratio=4.0)
    assert plan_image(400, 100, narrow).columns > 0
    with pytest.raises(ImageError, match="at most 4"):
        plan_image(401, 100, narrow)


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("LA", "PNG"), ("L", "WEBP")]
)
def test_modes_become_rgb_as_pillow_converts_them(mode, kind):
    data = encoded(noise(mode), kind)
    decoded = decode_image(data)
    assert decoded.mode == "RGB"
    assert decoded.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_sixteen_bit_grey_becomes_rgb_as_pillow_converts_it():
    data = encoded(Image.fromarray(np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)))
    assert Image.open(io.BytesIO(data)).mode.startswith("I")
    assert decode_image(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize("transparency", [3, bytes(range(16))])
def test_palettes_with_transparency_decode_without_a_warning(transparency):
    image = noise("RGB").quantize(16)
    opaque = image.convert("RGB").tobytes()
    assert decode_image(encoded(image, transparency=transparency)).tobytes() == opaque


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


def test_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encoded(noise("RGB"), "JPEG", exif=exif)).size == (20, 12)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 64,
        b"not an image",
        b"GIF89a",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        b"\x89PNG\r\n\x1a\n",
        PICTURE[:-200],
        PICTURE[:60],
        encoded(noise("RGB"), "JPEG")[:-40],
        encoded(noise("RGB"), "TIFF"),
    ],
)
def test_bytes_that_are_no_whole_image_are_refused(data):
    with pytest.raises(ImageError, match="image: bytes="):
        decode_image(data)


@given(st.integers(0, len(PICTURE) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_an_image_or_an_image_error(at, flip):
    data = bytearray(PICTURE)
    data[at] ^= flip
    try:
        image = decode_image(bytes(data), ImageLimits(max_pixels=100_000))
    except ImageError:
        return
    assert image.mode == "RGB"


def test_limits_name_the_value_and_the_bound():
    with pytest.raises(ImageError, match="bytes=0"):
        decode_image(b"")
    with pytest.raises(ImageError, match=f"bytes={len(PICTURE)}, must be at most 10"):
        decode_image(PICTURE, ImageLimits(max_bytes=10))
    with pytest.raises(ImageError, match="pixels=15000, must be at most 14999"):
        decode_image(PICTURE, ImageLimits(max_pixels=14_999))
    with pytest.raises(ImageError, match="149 pixels a side"):
        decode_image(PICTURE, ImageLimits(max_side=149))


@pytest.mark.parametrize("side", [12_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(side):
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(ImageError, match=r"pixels=.*at most 64000000"):
        decode_image(data)


def test_the_hash_covers_pixels_size_and_plan():
    image = noise("RGB", (20, 12))
    turned = Image.frombytes("RGB", (12, 20), image.tobytes())
    dotted = image.copy()
    dotted.putpixel((3, 3), (0, 0, 1))
    plan = plan_image(20, 12, TINY)
    hashes = {
        content_hash(image, plan),
        content_hash(image, plan_image(20, 12, FLASH)),
        content_hash(turned, plan),
        content_hash(dotted, plan),
    }
    assert len(hashes) == 4
    assert all(len(digest) == 32 for digest in hashes)


def test_the_hash_is_of_the_picture_and_not_of_its_file():
    image = noise("RGB")
    first, second = encoded(image, compress_level=1), encoded(image, compress_level=9)
    assert first != second
    assert describe_image(first, TINY) == describe_image(second, TINY)
