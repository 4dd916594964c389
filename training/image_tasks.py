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


@cache
def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images, data.target


def digit_image(rng: random.Random, held_out: bool) -> tuple[Image.Image, int]:
    """An enlarged digit and its value; slightly shifted and scaled in training."""
    images, labels = _digits()
    index = rng.randrange(TRAIN_DIGITS, len(labels)) if held_out else rng.randrange(TRAIN_DIGITS)
    small = Image.fromarray((images[index] * (255 / 16)).astype(np.uint8))
    size = IMAGE_SIDE - 12 if held_out else rng.randint(IMAGE_SIDE - 26, IMAGE_SIDE)
    large = small.resize((size, size), Image.Resampling.BICUBIC)
    free = IMAGE_SIDE - size
    place = (free // 2, free // 2) if held_out else (rng.randint(0, free), rng.randint(0, free))
    canvas = Image.new("L", (IMAGE_SIDE, IMAGE_SIDE))
    canvas.paste(large, place)
    return canvas.convert("RGB"), int(labels[index])


def figure_image(rng: random.Random, colour: str, shape: str) -> Image.Image:
    """One filled figure on grey."""
    image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), _GREY)
    draw = ImageDraw.Draw(image)
    r = rng.randint(18, 34)
    x, y = (rng.randint(r + 2, IMAGE_SIDE - r - 2) for _ in range(2))
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


def digit_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """Which digit is it?"""
    image, value = digit_image(rng, held_out)
    return Turn("digit", "Which digit is this?", f"This is the digit {value}.", (image,))


def figure_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """Colour and shape of one figure."""
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    return Turn(
        "figure",
        "What is in this picture?",
        f"This is a {colour} {shape}.",
        (figure_image(rng, colour, shape),),
    )


def compare_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """Whether two figures have the same shape."""
    first = rng.choice(SHAPES)
    second = first if rng.random() < 0.5 else rng.choice([shape for shape in SHAPES if shape != first])
    colours = rng.choices(COLOURS, k=2)
    images = tuple(figure_image(rng, c, s) for c, s in zip(colours, (first, second), strict=True))
    verdict = f"Yes, both are a {first}." if first == second else f"No, a {first} and a {second}."
    return Turn("compare", "Do these pictures show the same shape?", verdict, images)


IMAGE_TURNS: Final[tuple[Callable[..., Turn], ...]] = (digit_turn, figure_turn, compare_turn, compare_turn)
