"""Small drawings as SVG within a page: marks say what they are when they are pointed at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Self

#: pixels left of the marks for labels of rows, and below them for an axis
LABELS, AXIS = 110, 34
#: the colour of the page's text
INK = "currentColor"

#: left, top, width and height
Box = tuple[float, float, float, float]
Points = Sequence[tuple[float, float]]


class Svg:
    """A drawing of ``width`` x ``height`` pixels, whose marks are added one by one; text has the page's
    colour unless it is given one."""

    def __init__(self, width: float, height: float):
        self._size = f"{width:.0f} {height:.0f}"
        self._width = width
        self._marks: list[str] = []

    def __str__(self) -> str:
        marks = "\n".join(self._marks)
        return f'<svg viewBox="0 0 {self._size}" width="{self._width:.0f}" aria-hidden="true">{marks}</svg>'

    def _add(self, mark: str, title: str) -> Self:
        name = mark.split()[0]
        self._marks.append(f"<{mark}><title>{escape(title)}</title></{name}>" if title else f"<{mark}/>")
        return self

    def rect(self, box: Box, color: str, title: str = "", opacity: float = 1) -> Self:
        """A filled rectangle."""
        left, top, width, height = box
        faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        place = f'x="{left:.2f}" y="{top:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
        return self._add(f'rect {place} fill="{color}"{faint}', title)

    def line(self, points: Points, color: str = INK, title: str = "", dashed: bool = False) -> Self:
        """A line through points."""
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' * dashed
        return self._add(f'polyline points="{text}" fill="none" stroke="{color}"{dashes}', title)

    def dot(self, x: float, y: float, color: str, title: str) -> Self:
        """A filled circle."""
        return self._add(f'circle cx="{x:.2f}" cy="{y:.2f}" r="3" fill="{color}"', title)

    def text(self, x: float, y: float, text: str, anchor: str = "start", color: str = INK) -> Self:
        """A line of text whose foot is at ``y``; ``anchor``: start, middle or end."""
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
        )
        return self


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, with at most ``most`` steps between them."""
    least = (high - low or 1.0) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= least * (1 - 1e-9))
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
