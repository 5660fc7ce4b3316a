"""Names written next to lines in their panels, instead of entries of a legend."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from spbench.plots.series import grouped
from spbench.plots.style import shade

#: the most names of a panel and characters of a name; other names are easier to read in a legend
_MOST, _LONGEST = 6, 24
#: the distance of a label from its point, the same to the far right, and the least distance of two labels
_OFFSET_POINTS, _FAR_POINTS, _CLEAR_POINTS = 5.5, 12.0, 2.0
#: the least distances from other lines, so that a label does not seem to be theirs: tried first, and second
_OTHERS_POINTS = (6.5, 3.5)
_SIZE_POINTS = 7
#: the part of a panel's width that names to the right of the lines may take
_MOST_ROOM = 0.2
#: the least distance between the ends of lines with names to the right
_APART_POINTS = 5.0
#: a label stands next to one of the last points of its line, this many
_LAST_POINTS = 4
#: the most places tried for a label, and the most combinations of places
_MOST_PLACES, _MOST_TRIES = 40, 5000
#: a direction: (right, up)
_Way = tuple[float, float]
#: the directions from a point in which a label may stand, the preferred first
_DIRECTIONS: tuple[_Way, ...] = ((1, 0), (0, 1), (0, -1), (-1, 1), (1, -1), (-1, 0), (1, 1), (-1, -1))
#: the directions from a line's end where a panel got room for names at its right
_TO_THE_RIGHT: tuple[_Way, ...] = ((1, 0), (1, 0.5), (1, -0.5), (1, 1), (1, -1))

_Points = NDArray[np.float64]


def can_be_labelled(lines: Sequence[Line2D]) -> bool:
    """Whether names of lines are so few in each panel, and so short, that names can stand next to lines."""
    by_panel = [{str(line.get_label()) for line in some} for some in grouped(lines, _panel).values()]
    longest = max((len(name) for names in by_panel for name in names), default=0)
    return bool(by_panel) and max(map(len, by_panel)) <= _MOST and longest <= _LONGEST


def label_lines(figure: Figure, lines: Sequence[Line2D]) -> bool:
    """Write the names of all lines into the first panel that has all lines and room for their names, or else
    anywhere next to the lines; if need be, panels are widened to the right. The layout must be final.

    Returns:
        whether all names have room; if not, nothing is written.
    """
    if _labelled(figure, lines):
        return True
    before = _widened(figure, lines)
    if before and _labelled(figure, lines, _TO_THE_RIGHT):
        return True
    for ax, limits in before.items():
        ax.set_xlim(limits)
    return False


def _labelled(figure: Figure, lines: Sequence[Line2D], far: Sequence[_Way] = ()) -> bool:
    names = dict.fromkeys(str(line.get_label()) for line in lines)
    panels = list(grouped(lines, _panel).values())
    for clear in _OTHERS_POINTS:
        for some in [*panels, lines]:
            by_name = grouped(
                [line for line in some if len(_display(line))], lambda line: str(line.get_label())
            )
            if by_name.keys() == names.keys() and _placed(figure, by_name, clear, far):
                return True
    return False


def _panel(line: Line2D) -> Axes:
    ax = line.axes
    assert isinstance(ax, Axes)
    return ax


def _widened(figure: Figure, lines: Sequence[Line2D]) -> dict[Axes, tuple[float, float]]:
    """Make room for the longest name at the right end of each panel. Returns: the earlier x limits by panel;
    empty, without a change, if names would take too much of a panel, or if lines end so close together that a
    reader could not tell which name belongs to which line."""
    pixels = figure.dpi / 72
    texts = [_text(figure, str(line.get_label()), line) for line in lines]
    room = max(text.get_window_extent().width for text in texts) + (_FAR_POINTS + _OFFSET_POINTS) * pixels
    for text in texts:
        text.remove()
    panels = list(grouped(lines, _panel))
    last = [(line.axes, *_display(line)[-1]) for line in lines if len(_display(line))]
    for (one, x, y), (other, u, v) in combinations(last, 2):
        if one is other and np.hypot(x - u, y - v) < _APART_POINTS * pixels:
            return {}
    if any(room > _MOST_ROOM * ax.get_window_extent().width for ax in panels):
        return {}
    before = {ax: ax.get_xlim() for ax in panels}
    for ax, (low, high) in before.items():
        there, back = ax.transData, ax.transData.inverted()
        ends = [float(x) for line in lines if line.axes is ax for x, _ in _display(line)]
        end = float(there.transform((high, 1))[0])
        left = float(there.transform((low, 1))[0])
        # the new end leaves the room to the right of the last point after the change of scale
        new_end = left + (end - left) * (max(ends, default=left) - left) / (end - left - room)
        if new_end > end:
            ax.set_xlim(low, float(back.transform((new_end, 0))[0]))
    return before


def _placed(figure: Figure, lines: Mapping[str, Sequence[Line2D]], clear: float, far: Sequence[_Way]) -> bool:
    """Write each name next to one of its lines; return whether all names have room (else none is written)."""
    texts = [_text(figure, name, some[0]) for name, some in lines.items()]
    places = [
        [box for line in some for box in _free_boxes(line, text, clear, far)][:_MOST_PLACES]
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
    """One box of each choice, such that no two boxes overlap, with early boxes preferred; None if there is no
    solution, or if none is found in ``tries[0]`` attempts."""
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


def _free_boxes(line: Line2D, text: Text, clear: float, far: Sequence[_Way]) -> list[Bbox]:
    """The boxes, in pixels, where a line's name may stand: in the panel, clear of all lines, and at least
    ``clear`` points from other lines.

    Args:
        far: directions in which the name may also stand farther away from the line's end.
    """
    ax = line.axes
    assert ax is not None
    pixels = ax.figure.dpi / 72
    extent, bounds = text.get_window_extent(), ax.get_window_extent()
    # a line's published markers, of the same colour, count as its own
    mine = [
        other
        for other in ax.lines
        if other is line
        or (other.get_linestyle() == "None" and other.get_markeredgecolor() == line.get_markeredgecolor())
    ]
    own, others = _drawn(mine, pixels), _drawn([other for other in ax.lines if other not in mine], pixels)
    free = []
    ends = _display(line)[: -1 - _LAST_POINTS : -1]
    places = [(point, way, _OFFSET_POINTS) for point in ends for way in _DIRECTIONS]
    places += [(point, way, _FAR_POINTS) for point in ends[:1] for way in far]
    for (x, y), (right, up), points in places:
        left = x + right * points * pixels + (right - 1) / 2 * extent.width
        foot = y + up * _OFFSET_POINTS * pixels + (up - 1) / 2 * extent.height
        box = Bbox.from_bounds(left, foot, extent.width, extent.height)
        inside = bounds.contains(box.x0, box.y0) and bounds.contains(box.x1, box.y1)
        hit = _hit(box.padded(pixels), own) or _hit(box.padded(clear * pixels), others)
        if inside and not hit:
            free.append(box.padded(_CLEAR_POINTS * pixels / 2))
    return free


def _drawn(lines: Sequence[Line2D], pixels: float) -> _Points:
    """Points [n, 2] on lines and markers, in pixels, so close together that no text fits between."""
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
    """The points [n, 2] of a line in pixels, without points that are not finite."""
    points = line.get_transform().transform(np.asarray(line.get_xydata(), dtype=float))
    return np.asarray(points[np.isfinite(points).all(axis=1)])


def _hit(box: Bbox, points: _Points) -> bool:
    inside = (points > (box.x0, box.y0)) & (points < (box.x1, box.y1))
    return bool(inside.all(axis=1).any())
