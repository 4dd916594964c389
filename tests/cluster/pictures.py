"""Small pictures that differ."""

import io
import random

from PIL import Image


def picture(seed: int, width: int = 84, height: int = 84) -> bytes:
    """A PNG of random colours."""
    rng = random.Random(seed)
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
