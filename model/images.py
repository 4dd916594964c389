"""From an image file's bytes to patches: decoding under limits, the planned size, the token grid (spec §8).

Decoding is a boundary with untrusted input. Formats are a fixed list, size is judged before pixels are
decoded, and whatever the decoder trips over is one `ImageError`. Pillow and torch are imported where they
are used, so that plans and spans need none.

Letters: n patches in reading order, P patch side, T span positions.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from cedar.model.config import VisionConfig
from cedar.model.prompt_errors import ImageError

if TYPE_CHECKING:
    import torch
    from PIL import Image

PREPROCESSING: Final = b"cedar.image.v1: rgb, pad to plan on grey 127 bicubic, (x/255-1/2)/(1/2), bf16"
"""Names what happens to pixels; part of every content hash, so that a change of it changes every hash."""

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

START, SLOT, NEWLINE, END = 0, 1, 2, 3
"""Kinds of span positions, as `token_types` numbers them (text is -1)."""

_PADDING_COLOUR: Final = (127, 127, 127)


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What is accepted of one image file."""

    max_bytes: int = 20 * 2**20
    max_pixels: int = 64_000_000
    max_side: int = 65_535


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The size an image is brought to, in pixels, patches and tokens."""

    width: int
    height: int
    patch_rows: int
    patch_columns: int
    rows: int
    columns: int

    @property
    def span_length(self) -> int:
        """Prompt positions of the image."""
        return span_length(self.rows, self.columns)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Patch rows, patch columns, token rows, token columns."""
        return self.patch_rows, self.patch_columns, self.rows, self.columns


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """All that a prompt needs to know of an image; no pixels."""

    plan: ImagePlan
    content_hash: bytes

    @property
    def span_length(self) -> int:
        """Prompt positions of the image."""
        return self.plan.span_length


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedImage:
    """What the vision tower runs on: patches bf16 `[n, 3, P, P]` with the plan and the content hash."""

    plan: ImagePlan
    content_hash: bytes
    patches: torch.Tensor


def span_length(rows: int, columns: int) -> int:
    """Prompt positions of a token grid: start, each row and its newline, end."""
    return rows * (columns + 1) + 2


def token_types(rows: int, columns: int) -> list[int]:
    """The kind of each of the T positions of a span: START, then rows of SLOT closed by NEWLINE, then END."""
    return [START, *([SLOT] * columns + [NEWLINE]) * rows, END]


def decode_image(data: bytes, limits: ImageLimits | None = None) -> Image.Image:
    """The first frame as a loaded RGB image; EXIF orientation is not applied. Raises `ImageError`."""
    from PIL import Image, UnidentifiedImageError

    limits = limits or ImageLimits()
    if not data:
        raise ImageError("bytes", 0, "an image file, not empty")
    if len(data) > limits.max_bytes:
        raise ImageError("bytes", len(data), f"at most {limits.max_bytes}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, limits)
            image.load()
            image.info.pop("transparency", None)  # ignored by the conversion, which would warn of it
            return image.convert("RGB")
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError("pixels", f"over {Image.MAX_IMAGE_PIXELS}", f"at most {limits.max_pixels}") from None
    except UnidentifiedImageError:
        raise ImageError("bytes", data[:16], f"a file of one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders of damaged files raise nearly every built-in exception
        raise ImageError("bytes", f"<{type(error).__name__}: {error}>", "an undamaged image file") from None


def plan_image(width: int, height: int, vision: VisionConfig) -> ImagePlan:
    """The planned size and grids of a `width` x `height` image. Raises `ImageError` above `max_wh_ratio`."""
    if width < 1 or height < 1:
        raise ImageError("size", (width, height), "at least one pixel each way")
    ratio = max(width, height) / min(width, height)
    if vision.max_wh_ratio is not None and ratio > vision.max_wh_ratio:
        raise ImageError("side ratio", ratio, f"at most {vision.max_wh_ratio}")
    plan_w, plan_h = width, height
    if width * height < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (width * height))
        plan_w, plan_h = int(width * scale), int(height * scale)
    patch = vision.patch_size
    plan = _grids(math.ceil(plan_w / patch) * patch, math.ceil(plan_h / patch) * patch, vision)
    if plan.span_length > vision.max_image_tokens:
        plan = _grids(*_shrunk_size(width, height, vision), vision)
    assert plan.span_length <= vision.max_image_tokens, plan
    return plan


def describe_image(data: bytes, vision: VisionConfig, limits: ImageLimits | None = None) -> PlannedImage:
    """Plan and content hash of an image file: enough to build a prompt and look up features. Raises
    `ImageError`.
    """
    image = decode_image(data, limits)
    plan = plan_image(image.width, image.height, vision)
    return PlannedImage(plan=plan, content_hash=content_hash(image, plan))


def prepare_image(data: bytes, vision: VisionConfig, limits: ImageLimits | None = None) -> PreparedImage:
    """Patches, plan and content hash of an image file. Raises `ImageError`."""
    image = decode_image(data, limits)
    plan = plan_image(image.width, image.height, vision)
    patches = image_patches(image, plan, vision.patch_size)
    return PreparedImage(plan=plan, content_hash=content_hash(image, plan), patches=patches)


def content_hash(image: Image.Image, plan: ImagePlan) -> bytes:
    """SHA-256 of what the tower sees: preprocessing, mode, size, plan and pixels, each length-prefixed."""
    size = b"%dx%d" % image.size
    planned = b"%dx%d" % (plan.width, plan.height)
    digest = hashlib.sha256()
    for field in (PREPROCESSING, image.mode.encode(), size, planned, image.tobytes()):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def image_patches(image: Image.Image, plan: ImagePlan, patch: int) -> torch.Tensor:
    """bf16 `[n, 3, P, P]`: the RGB image fitted into the planned size on grey, cut in reading order, in [-1,
    1].
    """
    import torch
    from PIL import ImageOps

    fitted = ImageOps.pad(image, (plan.width, plan.height), color=_PADDING_COLOUR)
    pixels = torch.from_numpy(np.array(fitted, dtype=np.uint8))
    x = (pixels.to(torch.float32) / 255 - 0.5) / 0.5
    x = x.view(plan.patch_rows, patch, plan.patch_columns, patch, 3).permute(0, 2, 4, 1, 3)
    return x.reshape(-1, 3, patch, patch).to(torch.bfloat16)


def _check_size(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if max(width, height) > limits.max_side:
        raise ImageError("size", (width, height), f"at most {limits.max_side} pixels a side")
    if width * height > limits.max_pixels:
        raise ImageError("pixels", width * height, f"at most {limits.max_pixels}")


def _grids(width: int, height: int, vision: VisionConfig) -> ImagePlan:
    rows, columns = height // vision.patch_size, width // vision.patch_size
    return ImagePlan(
        width=width,
        height=height,
        patch_rows=rows,
        patch_columns=columns,
        rows=math.ceil(rows / vision.downsample_ratio),
        columns=math.ceil(columns / vision.downsample_ratio),
    )


def _shrunk_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """A large (width, height) of about the same aspect whose span keeps to `max_image_tokens`."""
    patch, cell = vision.patch_size, vision.patch_size * vision.downsample_ratio
    room = vision.max_image_tokens - 2
    aspect = height / width
    columns = math.sqrt(room / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, room // 2 * cell
    if rows < 1:
        return (room - 1) * cell, cell
    shrink = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(width * shrink / patch) * patch, math.floor(height * shrink / patch) * patch
