"""Names of lines beside them in their panels, in place of entries of a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from spbench.plots.series import grouped
from spbench.plots.style import shade

#: more names, or longer ones, are read more easily in a legend
_MOST, _LONGEST = 6, 24
#: how far a label is from its point, and at least from other labels
_OFFSET_POINTS, _CLEAR_POINTS = 5.5, 2.0
#: the same from other lines, to which it would seem to belong: what is tried first, and what will do
_OTHERS_POINTS = (6.5, 3.5)
_SIZE_POINTS = 7
#: a label stands beside one of the last so many points of its line
_LAST_POINTS = 4
#: places that are tried for a label, and combinations of places
_MOST_PLACES, _MOST_TRIES = 40, 5000
#: directions from a point in which a label may stand, the preferred first
_DIRECTIONS = ((1, 0), (0, 1), (0, -1), (-1, 1), (1, -1), (-1, 0), (1, 1), (-1, -1))

_Points = NDArray[np.float64]


def can_be_labelled(lines: Sequence[Line2D]) -> bool:
    """Whether the names of lines are few and short enough to stand beside them."""
    names = {str(line.get_label()) for line in lines}
    return bool(names) and len(names) <= _MOST and max(map(len, names)) <= _LONGEST


def label_lines(figure: Figure, lines: Sequence[Line2D]) -> bool:
    """Write the names of all lines into the first panel that has all and room for them, or else each into the
    first panel that has room for it; the layout is final.

    Returns:
        whether all names have room; if not, nothing is written.
    """
    names = dict.fromkeys(str(line.get_label()) for line in lines)
    panels = [some for ax, some in grouped(lines, lambda line: line.axes).items() if isinstance(ax, Axes)]
    for clear in _OTHERS_POINTS:
        for some in [*panels, lines]:
            by_name = grouped(
                [line for line in some if len(_display(line))], lambda line: str(line.get_label())
            )
            if by_name.keys() == names.keys() and _placed(figure, by_name, clear):
                return True
    return False


def _placed(figure: Figure, lines: Mapping[str, Sequence[Line2D]], clear: float) -> bool:
    """Write each name beside one of its lines, if all have room."""
    texts = [_text(figure, name, some[0]) for name, some in lines.items()]
    places = [
        [box for line in some for box in _free_boxes(line, text, clear)][:_MOST_PLACES]
        for some, text in zip(lines.values(), texts, strict=True)
    ]
    boxes = _solve(places, [], [_MOST_TRIES])
    for text, box in zip(texts, boxes or (), strict=False):
        x, y = figure.transFigure.inverted().transform((box.x0, box.y0))
        text.set_position((float(x), float(y)))
    if boxes is None:
        for text in texts:
            text.remove()
    return boxes is not None


def _text(figure: Figure, name: str, line: Line2D) -> Text:
    text = figure.text(0, 0, name, fontsize=_SIZE_POINTS, verticalalignment="bottom", gid=f"label {name}")
    text.set_color(shade(str(line.get_color()), 0.85))
    text.set_in_layout(False)
    return text


def _solve(choices: Sequence[Sequence[Bbox]], taken: Sequence[Bbox], tries: list[int]) -> list[Bbox] | None:
    """One box out of each choice so that no two boxes overlap, an early box rather than a later one; None if
    that cannot be, or is not solved in that many ``tries``."""
    if not choices:
        return []
    for box in choices[0]:
        tries[0] -= 1
        if tries[0] < 0:
            return None
        if not any(box.overlaps(other) for other in taken):
            rest = _solve(choices[1:], [*taken, box], tries)
            if rest is not None:
                return [box, *rest]
    return None


def _free_boxes(line: Line2D, text: Text, clear: float) -> list[Bbox]:
    """Where the name may stand, in pixels: in the panel, clear of all lines, and of other ones by ``clear``
    points."""
    ax = line.axes
    assert ax is not None
    pixels = ax.figure.dpi / 72
    extent, bounds = text.get_window_extent(), ax.get_window_extent()
    # its published markers are its own too
    mine = [
        other
        for other in ax.lines
        if other is line
        or (other.get_linestyle() == "None" and other.get_markeredgecolor() == line.get_markeredgecolor())
    ]
    own, others = _drawn(mine, pixels), _drawn([other for other in ax.lines if other not in mine], pixels)
    free = []
    for x, y in _display(line)[: -1 - _LAST_POINTS : -1]:
        for right, up in _DIRECTIONS:
            left = x + right * _OFFSET_POINTS * pixels + (right - 1) / 2 * extent.width
            foot = y + up * _OFFSET_POINTS * pixels + (up - 1) / 2 * extent.height
            box = Bbox.from_bounds(left, foot, extent.width, extent.height)
            inside = bounds.contains(box.x0, box.y0) and bounds.contains(box.x1, box.y1)
            hit = _hit(box.padded(pixels), own) or _hit(box.padded(clear * pixels), others)
            if inside and not hit:
                free.append(box.padded(_CLEAR_POINTS * pixels / 2))
    return free


def _drawn(lines: Sequence[Line2D], pixels: float) -> _Points:
    """Points on lines and markers, in pixels, so close together that no text fits between."""
    parts = [np.empty((0, 2))]
    for line in lines:
        points = _display(line)
        if line.get_linestyle() != "None":
            for one, other in pairwise(points):
                parts.append(np.linspace(one, other, 2 + int(np.hypot(*(other - one)) / 4)))
        if str(line.get_marker()) not in ("None", ""):
            reach = line.get_markersize() / 2 * pixels
            corners = reach * np.array([[x, y] for x in (-1, 0, 1) for y in (-1, 0, 1)])
            parts.append((points[:, None] + corners[None]).reshape(-1, 2))
    return np.concatenate(parts)


def _display(line: Line2D) -> _Points:
    """The points of a line in pixels."""
    points = line.get_transform().transform(np.asarray(line.get_xydata(), dtype=float))
    return np.asarray(points[np.isfinite(points).all(axis=1)])


def _hit(box: Bbox, points: _Points) -> bool:
    inside = (points > (box.x0, box.y0)) & (points < (box.x1, box.y1))
    return bool(inside.all(axis=1).any())
