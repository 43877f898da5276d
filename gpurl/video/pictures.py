"""Puts pictures of several environments side by side, each with its step and its return so far."""

import math
from collections.abc import Sequence

import numpy as np

from gpurl.colors import INK, PALE
from gpurl.envs.canvas import font, load_pillow

GAP = 4  # pixels between two pictures
WIDE = 1.4  # width of a grid over its height, where the number of pictures allows it


def arrange(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """One picture [H, W, 3] of all `pictures`, which have one shape; H and W are even, as encoders
    of videos need it.
    """
    height, width, _ = pictures[0].shape
    columns = num_columns(len(pictures), width / height)
    rows = -(-len(pictures) // columns)
    total_height = rows * (height + GAP) - GAP
    total_width = columns * (width + GAP) - GAP
    even = (total_height + total_height % 2, total_width + total_width % 2, 3)
    whole = np.empty(even, np.uint8)
    whole[:] = tuple(bytes.fromhex(PALE[1:]))
    for number, picture in enumerate(pictures):
        top = number // columns * (height + GAP)
        left = number % columns * (width + GAP)
        whole[top : top + height, left : left + width] = picture
    return whole


def num_columns(count: int, aspect: float) -> int:
    """Of a grid of `count` pictures, each `aspect` times as wide as high: near WIDE, and with few
    empty places.
    """

    def badness(columns: int) -> float:
        rows = -(-count // columns)
        empty = (columns * rows - count) / count
        return abs(math.log(columns * aspect / rows / WIDE)) + 2.0 * empty

    return min(range(1, count + 1), key=badness)


def caption(picture: np.ndarray, text: str) -> np.ndarray:
    """The picture with `text` in its upper left corner."""
    image = load_pillow().fromarray(picture)
    from PIL import ImageDraw

    size = max(9, round(len(picture) / 21))
    pen = ImageDraw.Draw(image, "RGBA")
    edge = size // 2
    left, top, right, bottom = pen.textbbox((edge, edge), text, font(size))
    # a pale box, so that it can be read on any picture
    box = (left - edge / 2, top - edge / 2, right + edge / 2, bottom + edge / 2)
    pen.rounded_rectangle(box, size / 3, (255, 255, 255, 190))
    pen.text((edge, edge), text, INK, font(size))
    return np.asarray(image)


def fade(picture: np.ndarray) -> np.ndarray:
    """Paler: of an episode that ended."""
    return (picture * 0.65 + 255 * 0.35).astype(np.uint8)
