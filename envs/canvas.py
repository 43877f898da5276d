"""A canvas on which a tensor task draws one environment: lines, circles and arrows in the task's
own coordinates, antialiased.

    def draw(self, canvas, state, action):
        canvas.view(-2.0, -1.0, 2.0, 1.0)
        canvas.circle((float(state["position"]), 0.0), 0.1, "blue")

Widths and sizes of text are in pixels of a picture 256 pixels high, and grow with it.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from gpurl.colors import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE
from gpurl.errors import UsageError, install_extra

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

Point = Sequence[float]  # (x, y)

COLORS = {
    "blue": BLUE,
    "orange": ORANGE,
    "green": GREEN,
    "purple": PURPLE,
    "ink": INK,
    "grey": GREY,
    "pale": PALE,
    "faint": "#f0f0f0",
    "white": "#ffffff",
}
SAMPLES = 3  # of a pixel, along each side
MAX_TRAIL = 240  # points; beyond it every other one goes
SHADES = 12  # of a trail


def load_pillow() -> ModuleType:
    """The module PIL.Image; UsageError that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            f"pictures of tasks need Pillow, {error.name or error} is missing: "
            f"{install_extra('video')}"
        ) from error
    return Image


@cache
def font(size: int) -> "FreeTypeFont":
    """The font of the plots, `size` pixels high."""
    import matplotlib
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)


def scale(picture: np.ndarray, height: int) -> np.ndarray:
    """[height, W, 3] uint8 of a picture [H, W, 3]; the width stays in proportion, and even."""
    if len(picture) == height:
        return picture
    width = max(2, 2 * round(picture.shape[1] * height / len(picture) / 2))
    image = load_pillow()
    smooth = image.Resampling.LANCZOS
    return np.asarray(image.fromarray(picture).resize((width, height), smooth))


class Canvas:
    """Pictures of one environment in one episode, `height` pixels high and as wide as `view` asks
    for.
    """

    def __init__(self, height: int) -> None:
        self.height = height
        self._trails: dict[str, list[Point]] = {}
        self._texts: list[tuple[Point, str, str, float]] = []
        self._image: Image | None = None
        # of the view: samples for a unit of the task, and its upper left corner
        self._scale = 1.0
        self._left = self._top = 0.0

    def view(
        self, left: float, bottom: float, right: float, top: float, color: str = "white"
    ) -> None:
        """Begin a picture that shows this part of the task's plane; x grows to the right, y
        upwards. Its width follows from the height: both axes have one scale.
        """
        image = load_pillow()
        from PIL import ImageDraw

        if right <= left or top <= bottom:
            raise UsageError(
                f"canvas.view(left, bottom, right, top): wanted left < right and bottom < top, got "
                f"{left:g}, {bottom:g}, {right:g}, {top:g}"
            )
        rows = self.height * SAMPLES
        self._scale = rows / (top - bottom)
        self._left = left
        self._top = top
        width = max(2, 2 * round(self.height * (right - left) / (top - bottom) / 2))
        self._image = image.new("RGB", (width * SAMPLES, rows), _rgba(color, 1.0)[:3])
        self._pen: ImageDraw.ImageDraw = ImageDraw.Draw(self._image, "RGBA")
        self._texts = []

    def line(
        self,
        points: Sequence[Point],
        color: str = "ink",
        width: float = 1.5,
        alpha: float = 1.0,
    ) -> None:
        """Through all `points`, with round ends."""
        pixels = [self._pixel(point) for point in points]
        thickness = self._thickness(width)
        fill = _rgba(color, alpha)
        pen = self._drawing()
        pen.line(pixels, fill, round(thickness), joint="curve")
        if alpha == 1.0 and thickness > 2 * SAMPLES:
            for x, y in (pixels[0], pixels[-1]):
                half = thickness / 2
                pen.ellipse((x - half, y - half, x + half, y + half), fill)

    def circle(
        self,
        center: Point,
        radius: float,
        color: str = "ink",
        alpha: float = 1.0,
        outline: str | None = None,
        width: float = 1.5,
    ) -> None:
        """A disc; radius in the task's units. outline: the colour of its edge, `width` wide."""
        x, y = self._pixel(center)
        size = radius * self._scale
        box = (x - size, y - size, x + size, y + size)
        edge = None if outline is None else _rgba(outline, 1.0)
        thickness = round(self._thickness(width)) if outline else 0
        self._drawing().ellipse(box, _rgba(color, alpha), edge, thickness)

    def dot(self, center: Point, size: float = 5.0, color: str = "ink", alpha: float = 1.0) -> None:
        """A disc whose diameter is `size`, as widths are measured."""
        self.circle(center, self._thickness(size) / 2 / self._scale, color, alpha)

    def polygon(self, points: Sequence[Point], color: str = "ink", alpha: float = 1.0) -> None:
        """Filled."""
        self._drawing().polygon([self._pixel(point) for point in points], _rgba(color, alpha))

    def arrow(
        self,
        points: Sequence[Point],
        color: str = "ink",
        width: float = 2.0,
        alpha: float = 1.0,
    ) -> None:
        """Along all `points`, its tip at the last one; nothing if it has no length."""
        end = np.array(self._pixel(points[-1]))
        start = np.array(self._pixel(points[-2]))
        length = float(np.hypot(*(end - start)))
        if length < 1.0:
            return
        ahead = (end - start) / length
        side = np.array((-ahead[1], ahead[0]))
        head = 3.2 * self._thickness(width)
        back = end - ahead * head
        # the shaft ends inside the head
        shaft = [self._pixel(point) for point in points[:-1]]
        if length > head / 2:
            shaft.append(tuple(end - ahead * head / 2))
        pen = self._drawing()
        if len(shaft) > 1:
            pen.line(shaft, _rgba(color, alpha), round(self._thickness(width)), joint="curve")
        corners = [tuple(end), tuple(back + side * head / 2), tuple(back - side * head / 2)]
        pen.polygon(corners, _rgba(color, alpha))

    def trail(self, name: str, point: Point, color: str = "blue", width: float = 1.5) -> None:
        """Add `point` to the trail `name` of this episode, and draw it: the older, the paler."""
        points = self._trails.setdefault(name, [])
        points.append(tuple(point))
        if len(points) > MAX_TRAIL:
            del points[1:-1:2]
        pen = self._drawing()
        thickness = round(self._thickness(width))
        pixels = [self._pixel(each) for each in points]
        for shade in range(SHADES):
            first = shade * len(pixels) // SHADES
            last = (shade + 1) * len(pixels) // SHADES
            piece = pixels[first : last + 1]
            if len(piece) > 1:
                pen.line(piece, _rgba(color, 0.1 + 0.6 * (shade + 1) / SHADES), thickness)

    def text(self, point: Point, text: str, color: str = "grey", size: float = 11.0) -> None:
        """Its left end, at half its height, is `point`."""
        self._drawing()
        self._texts.append((self._pixel(point), text, color, size))

    def picture(self) -> np.ndarray:
        """[H, W, 3] uint8 of what was drawn since `view`."""
        self._drawing()
        assert self._image is not None
        from PIL import ImageDraw

        # the mean over a pixel's samples smooths edges
        image = self._image.reduce(SAMPLES)
        pen = ImageDraw.Draw(image)
        for (x, y), text, color, size in self._texts:
            letters = font(max(6, round(size * self.height / 256)))
            pen.text((x / SAMPLES, y / SAMPLES), text, _rgba(color, 1.0), letters, "lm")
        return np.asarray(image)

    def _drawing(self) -> "ImageDraw":
        if self._image is None:
            raise UsageError("canvas.view(left, bottom, right, top) comes first in draw")
        return self._pen

    def _pixel(self, point: Point) -> tuple[float, float]:
        """Of the samples' picture."""
        x, y = point
        return (float(x) - self._left) * self._scale, (self._top - float(y)) * self._scale

    def _thickness(self, width: float) -> float:
        return max(1.0, width * self.height * SAMPLES / 256)


@cache
def _rgba(color: str, alpha: float) -> tuple[int, int, int, int]:
    """Of a name in COLORS or of #rrggbb."""
    text = COLORS.get(color, color).removeprefix("#")
    try:
        red, green, blue = bytes.fromhex(text)
    except ValueError:
        raise UsageError(
            f"a colour is one of {', '.join(COLORS)} or like #2463c2, got {color!r}"
        ) from None
    return red, green, blue, round(255 * alpha)
