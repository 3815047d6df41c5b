"""From the bytes of an image to its pixels, for bytes that a stranger made.

Owns the formats that are read at all and the bounds: sides and pixels are known from the header and checked before any
row is decoded, and of an animation only the first frame is ever looked at (CVE-2026-22778, CVE-2026-22773). Blocks:
call it off the event loop.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from ceiba.core import limits
from ceiba.core.errors import BadRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode(data: bytes, where: str) -> np.ndarray:
    """uint8 [height, width, 3]. Transparent parts are white. Raises BadRequest naming ``where``."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            _check(width, height, where)
            image.draft("RGB", None)
            if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
                above = image.convert("RGBA")
                image_rgb = Image.new("RGB", above.size, "white")
                image_rgb.paste(above, mask=above.getchannel("A"))
            else:
                image_rgb = image.convert("RGB")
    except BadRequest:
        raise
    except Exception as error:  # Pillow's readers raise whatever a broken file makes them
        name = type(error).__name__
        raise BadRequest(f"{where} is not a whole {', '.join(FORMATS)} image ({name}).", param=where) from None
    return np.asarray(image_rgb)


def _check(width: int, height: int, where: str) -> None:
    if not (1 <= width <= limits.MAX_IMAGE_SIDE and 1 <= height <= limits.MAX_IMAGE_SIDE):
        raise BadRequest(f"{where} is {width} x {height}; a side has 1..{limits.MAX_IMAGE_SIDE} pixels.", param=where)
    if width * height > limits.MAX_IMAGE_PIXELS:
        raise BadRequest(f"{where} has {width * height} pixels; the limit is {limits.MAX_IMAGE_PIXELS}.", param=where)
