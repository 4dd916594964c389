"""Seeded picture tasks: handwritten digits, drawn figures, two images compared.

The digits are scikit-learn's copy of the UCI optical recognition test set (1,797 images of 8 x 8, CC BY 4.0).
The last 297 are held out: training never draws one of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from cedar.training.checkpoint_config import IMAGE_SIDE
from cedar.training.text_tasks import Turn
from cedar.training.words import COLOURS, SHAPES
from PIL import Image, ImageDraw

TRAIN_DIGITS: Final = 1500
LONGEST: Final = 400  # pixels of an image's longer side
DIGIT_LONGEST: Final = 168  # pixels: a digit is drawn over at most four by four tokens

_RGB: Final = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 220, 50),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
    "orange": (245, 140, 30),
    "purple": (140, 50, 170),
}
_GREY: Final = (127, 127, 127)
_SMALLEST: Final = (IMAGE_SIDE, IMAGE_SIDE)


@cache
def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images, data.target


Size = tuple[int, int]
"""Pixels: width, height."""


def draw_size(rng: random.Random, smallest: float = 0.7, longest: int = LONGEST) -> Size:
    """The smallest image for that share, else sides and aspects up to `longest` pixels.

    An image of 400 x 300 pixels fills the longest span.
    """
    if rng.random() < smallest:
        return IMAGE_SIDE, IMAGE_SIDE
    long = rng.randint(IMAGE_SIDE, longest)
    short = max(IMAGE_SIDE, int(long * rng.uniform(0.5, 1.0)))
    return (long, short) if rng.random() < 0.5 else (short, long)


def digit_image(rng: random.Random, held_out: bool, size: Size | None = None) -> tuple[Image.Image, int]:
    """An enlarged digit and its value; held out: centred, and 84 x 84 pixels unless `size` says otherwise."""
    images, labels = _digits()
    index = rng.randrange(TRAIN_DIGITS, len(labels)) if held_out else rng.randrange(TRAIN_DIGITS)
    small = Image.fromarray((images[index] * (255 / 16)).astype(np.uint8))
    width, height = size or (_SMALLEST if held_out else draw_size(rng, longest=DIGIT_LONGEST))
    side = min(width, height)
    side = side * 6 // 7 if held_out else rng.randint(side * 5 // 7, side)
    free = width - side, height - side
    place = (free[0] // 2, free[1] // 2) if held_out else (rng.randint(0, free[0]), rng.randint(0, free[1]))
    canvas = Image.new("L", (width, height))
    canvas.paste(small.resize((side, side), Image.Resampling.BICUBIC), place)
    return canvas.convert("RGB"), int(labels[index])


def figure_image(rng: random.Random, colour: str, shape: str, size: Size = _SMALLEST) -> Image.Image:
    """One filled figure on grey, 84 x 84 pixels unless `size` says otherwise."""
    width, height = size
    image = Image.new("RGB", size, _GREY)
    draw = ImageDraw.Draw(image)
    side = min(width, height)
    r = rng.randint(side * 3 // 14, side * 2 // 5)
    x, y = rng.randint(r + 2, width - r - 2), rng.randint(r + 2, height - r - 2)
    fill = tuple(max(0, min(255, channel + rng.randint(-10, 10))) for channel in _RGB[colour])
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=fill)
    else:
        arm = max(4, r // 3)
        draw.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
        draw.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
    return image


def digit_turn(rng: random.Random, held_out: bool = False, size: Size | None = None) -> Turn:
    """Which digit is it?"""
    image, value = digit_image(rng, held_out, size)
    return Turn("digit", "Which digit is this?", f"This is the digit {value}.", (image,))


def figure_turn(rng: random.Random, held_out: bool = False, size: Size | None = None) -> Turn:
    """Colour and shape of one figure."""
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    size = size or (_SMALLEST if held_out else draw_size(rng))
    image = figure_image(rng, colour, shape, size)
    return Turn("figure", "What is in this picture?", f"This is a {colour} {shape}.", (image,))


def compare_turn(rng: random.Random, held_out: bool = False, size: Size | None = None) -> Turn:
    """Whether two figures have the same shape: both are named, then judged."""
    first, second, images = _pair(rng, held_out, size)
    verdict = "the same shape" if first == second else "not the same shape"
    answer = f"A {first} and a {second}: {verdict}."
    return Turn("compare", "Do these pictures show the same shape?", answer, images)


def _pair(rng: random.Random, held_out: bool, size: Size | None) -> tuple[str, str, tuple[Image.Image, ...]]:
    first = rng.choice(SHAPES)
    second = first if rng.random() < 0.5 else rng.choice([shape for shape in SHAPES if shape != first])
    sizes = [size or (_SMALLEST if held_out else draw_size(rng)) for _ in range(2)]
    pairs = zip((first, second), sizes, strict=True)
    return first, second, tuple(figure_image(rng, rng.choice(COLOURS), shape, s) for shape, s in pairs)


IMAGE_TURNS: Final[tuple[Callable[..., Turn], ...]] = (digit_turn, digit_turn, figure_turn, compare_turn)
"""The digit is the hardest of them to see."""
