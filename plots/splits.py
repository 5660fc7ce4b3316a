"""Figures of splits of GPUs over the axes of a mesh (memory, bytes by axis and time of the same work; longest
sequence and largest batch), and of placements of packed documents."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.impls.axes import MESH_AXES, in_order
from spbench.impls.folding import FOLDED_AXES
from spbench.plots.axes import lost_notes
from spbench.plots.bars import Bar, Segment, draw_levels, fill, levels_inches
from spbench.plots.claims import claims_of
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.largest import BATCH, GIVEN, LENGTH, Searched
from spbench.plots.lines import Value, measured
from spbench.plots.series import (
    Row,
    by_model,
    differing,
    gpus,
    grouped,
    model,
    searches_for,
    setting_text,
    settings,
    shared,
    strategy,
    title,
)
from spbench.plots.style import (
    INK,
    TIMES,
    category_colors,
    length_text,
    method_color,
    model_name,
    number,
    short_name,
)

_GIB = 2**30
#: the name for bytes sent over the ranks of several axes at once, such as sums of gradients
SEVERAL = "several axes at once"
_ALONG = [*MESH_AXES, SEVERAL, "ep", "edp", "etp"]

_seconds = measured("step_time_s")


def split_names(rows: Sequence[Row]) -> list[str]:
    """A name for each row, such as "tp 4 x sp 16, Megatron-SP + RSA": the axes of several ranks from the
    outermost to the innermost, and the strategy; then the number of micro-batches if there are several, and
    settings that differ between rows of otherwise equal names."""
    names = [
        ", ".join(filter(None, [_axes(row), short_name(strategy(row)), _micro_batches(row)])) for row in rows
    ]
    for alike in grouped(range(len(rows)), lambda at: names[at]).values():
        for at, text in zip(alike, _told_apart([settings(rows[at]) for at in alike]), strict=True):
            names[at] = ", ".join(filter(None, [names[at], text]))
    return names


def _axes(row: Row) -> str:
    cell = row["cell"]
    sizes = in_order(cell["sizes"], cell.get("mesh") or MESH_AXES)
    several = {axis: f"{axis} {size}" for axis, size in sizes.items() if size > 1}
    mesh = f" {TIMES} ".join(text for axis, text in several.items() if axis not in FOLDED_AXES) or "1 GPU"
    return ", ".join([mesh, *(several[axis] for axis in FOLDED_AXES if axis in several)])


def _micro_batches(row: Row) -> str:
    count = row["cell"]["training"]["micro_batches"]
    return f"{count} micro-batches" if count > 1 else ""


def _told_apart(of_rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = differing(of_rows)
    return [", ".join(filter(None, (setting_text(name, of.get(name)) for name in names))) for of in of_rows]


def sent_by_axis(row: Row) -> dict[str, float]:
    """The bytes that a GPU sends in a step, by axis: along each axis of the mesh in order, along SEVERAL, and
    along folded axes. Axes without bytes are left out."""
    sent: Counter[str] = Counter()
    for entry in row["measurement"].get("communication") or ():
        axis = entry["axis"]
        sent[axis if axis in _ALONG else SEVERAL] += entry["sent_bytes"]
    return {axis: sent[axis] for axis in _ALONG if sent[axis]}


# -- the same work --------------------------------------------------------------------------------------


def _same_work(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A row of panels for each model, cluster, batch and sequence length, with the splits from the fastest
    to the slowest, then splits without a time. The comparison is not used, because no number was published.
    """
    works = {name: _by_time(some) for name, some in grouped(rows, _work).items()}
    named = ((f"{name}, {split}", row) for name, some in works.items() for split, row in some.items())
    grid = _empty_grid(rows, "Splits of the same work", named)
    used = {axis for row in rows for axis in sent_by_axis(row)}
    for name, some in works.items():
        shape: Any = {"scale": name, "inches": levels_inches(len(some))}
        memory = Panel(partial(_draw_memory, rows=some), name, "Peak memory (GiB)", **shape)
        sent = Panel(partial(_draw_sent, rows=some, used=used), "", "Sent by a GPU\nin a step (GiB)", **shape)
        draw_times = partial(_draw, rows=some, quantity="time", segments=_times)
        time = Panel(draw_times, "", "Simulated step\ntime (s)", **shape)
        grid.add([[memory], [sent], [time]])
    return grid


def _empty_grid(rows: Sequence[Row], heading: str, named: Iterable[tuple[str, Row]]) -> PanelGrid:
    """A grid without panels, with notes on the named rows that have no number."""
    lost = [row for row in rows if row["status"] != "ok"]
    return PanelGrid(title(rows, heading), list(lost_notes(named)), lost, page_only=True)


def _work(row: Row) -> str:
    cell = row["cell"]
    return (
        f"{model_name(model(row))}, batch {cell['batch']}, sequence length {length_text(cell['seq_len'])}, "
        f"{gpus(row)} GPUs of {cell['cluster']}"
    )


def _by_time(rows: Sequence[Row]) -> dict[str, Row]:
    """The rows by the names of their splits, the fastest first."""
    named = zip(split_names(rows), rows, strict=True)
    return dict(sorted(named, key=lambda entry: _seconds(entry[1]) or float("inf")))


_Segments = Callable[[Row, str], Iterable[Segment]]


def _draw(ax: Axes, rows: Mapping[str, Row], quantity: str, segments: _Segments, reach: float = 0) -> Drawn:
    """Draw a level for each row; ``segments`` makes the segments of a bar from a row and its split's name."""
    bars = [
        Bar([*segments(row, split)], f"{quantity} {split}", status=row["status"])
        for split, row in rows.items()
    ]
    return draw_levels(ax, bars, list(rows), reach)


def _draw_memory(ax: Axes, rows: Mapping[str, Row]) -> Drawn:
    """Draw peaks of memory (hatched for steps that do not fit), and the card's usable memory as a line."""

    def segments(row: Row, split: str) -> Iterator[Segment]:
        unlike = ("", 1.0) if row["status"] == "ok" else ("////", 0.35)
        if (peak := row["measurement"].get("peak_memory_bytes")) is not None:
            yield Segment(peak / _GIB, method_color(strategy(row)), f"memory {split}", *unlike)

    limits = [row["measurement"].get("usable_memory_bytes") for row in rows.values()]
    limit = max((nbytes / _GIB for nbytes in limits if nbytes is not None), default=0.0)
    _draw(ax, rows, "memory", segments, reach=1.05 * limit)
    if not limit:
        return Drawn()
    ax.axvline(limit, color=INK, linestyle="--", linewidth=0.9, zorder=3, gid="limit")
    line = Line2D([], [], color=INK, linestyle="--", linewidth=0.9, label="usable memory of the card")
    return Drawn(published=[line])


def _draw_sent(ax: Axes, rows: Mapping[str, Row], used: set[str]) -> Drawn:
    """Draw the bytes by the axis along which they are sent; the legend has the axes in ``used``."""
    colors = category_colors(_ALONG)

    def segments(row: Row, split: str) -> Iterator[Segment]:
        for axis, nbytes in sent_by_axis(row).items():
            yield Segment(nbytes / _GIB, colors[axis], f"sent {axis} {split}")

    _draw(ax, rows, "sent", segments)
    return Drawn(methods=[Patch(**fill(color), label=axis) for axis, color in colors.items() if axis in used])


def _times(row: Row, split: str) -> Iterator[Segment]:
    if (seconds := _seconds(row)) is not None:
        yield Segment(seconds, method_color(strategy(row)), f"time {split}")


# -- the largest that fits --------------------------------------------------------------------------------


def _largest(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A row for each model, with a panel for the longest sequence and a panel for the largest batch, and the
    splits from the longest sequence to the shortest. The text at a bar's end has the ratio to the baseline,
    if the comparison has it."""
    rows = [row for row in rows if any(searches_for(row, searched.field) for searched in (LENGTH, BATCH))]
    ratios = {claim.numerator: claim.ours for claim in claims_of(comparison)}
    models = {name: _by_split(some) for name, some in by_model(rows).items()}
    named = (
        (f"{name}, {split}", row)
        for name, some in models.items()
        for split, of in some.items()
        for row in of.values()
    )
    grid = _empty_grid(rows, "Longest sequence and largest batch by split", named)
    for name, some in models.items():
        grid.add([[_largest_panel(name, some, searched, ratios)] for searched in (LENGTH, BATCH)])
    return grid


def _largest_panel(
    name: str,
    splits: Mapping[str, Mapping[Searched, Row]],
    searched: Searched,
    ratios: Mapping[str, float | None],
) -> Panel:
    given = GIVEN[searched]
    value = shared([of[searched] for of in splits.values() if searched in of], given.field)
    bars = [
        _bar(searched, split, of.get(searched), ratios, method_color(strategy(next(iter(of.values())))))
        for split, of in splits.items()
    ]
    return Panel(
        partial(draw_levels, bars=bars, names=list(splits)),
        name + (f", {given.name} {value}" if value else ""),
        f"Largest {searched.name} ({searched.unit})",
        scale=name,
        inches=levels_inches(len(bars)),
    )


def _by_split(rows: Sequence[Row]) -> dict[str, dict[Searched, Row]]:
    """The rows by the name of the split and the searched field, the split of the longest sequence first."""
    splits: dict[str, dict[Searched, Row]] = {}
    for searched in (LENGTH, BATCH):
        some = [row for row in rows if searches_for(row, searched.field)]
        for split, row in zip(split_names(some), some, strict=True):
            splits.setdefault(split, {})[searched] = row
    return dict(sorted(splits.items(), key=lambda entry: -_answer(entry[1].get(LENGTH))))


def _answer(row: Row | None) -> int:
    return 0 if row is None or row["status"] != "ok" else row["measurement"].get("answer") or 0


def _bar(
    searched: Searched, split: str, row: Row | None, ratios: Mapping[str, float | None], color: str
) -> Bar:
    gid, answer = f"{searched.field} {split}", _answer(row)
    if row is None:
        return Bar([Segment(0, color, gid)], gid, text=" ")
    if not answer:
        return Bar([], gid, status=row["status"])
    ratio = ratios.get(row["key"])
    text = number(answer) + (f"  ({number(ratio)}{TIMES})" if ratio is not None else "")
    return Bar([Segment(answer, color, gid)], gid, text)


draw_four_d = Drawing("four_d", _same_work)
"""Splits of the same work over the axes of a mesh: peak memory, bytes by axis and simulated time of each."""

draw_max_seqlen_4d = Drawing("max_seqlen_4d", _largest)
"""The longest sequence and the largest batch of each split over the axes of a mesh, beside a baseline's."""


# -- placements of packed documents ----------------------------------------------------------------------


def placement_imbalance(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """For each length and number of GPUs a panel of imbalance, above a panel of step times: for each variant
    the mean over several draws of documents, and in parentheses the range."""
    colors = category_colors(row["cell"]["variant"] for row in rows)
    order = list(colors)

    def place(row: Row) -> tuple[int, int, int]:
        return row["cell"]["seq_len"], gpus(row), order.index(row["cell"]["variant"])

    facets = [
        [
            _placement_panel(some, colors, name, "Heaviest rank over mean", measured("imbalance")),
            _placement_panel(some, colors, name, "Step (ms)", measured("step_time_s", 1e-3)),
        ]
        for name, some in grouped(sorted(rows, key=place), _load).items()
    ]
    lost = [row for row in rows if row["status"] != "ok"]
    return PanelGrid("Packed documents on a ring, by placement", lost=lost).add(facets, abreast=2)


def _load(row: Row) -> str:
    return f"{length_text(row['cell']['seq_len'])} tokens, {gpus(row)} GPUs"


def _placement_panel(
    rows: Sequence[Row], colors: Mapping[str, str], title: str, label: str, value: Value
) -> Panel:
    bars, names = [], []
    for name, draws in grouped(rows, lambda row: row["cell"]["variant"]).items():
        values = [height for height in map(value, draws) if height is not None]
        gid = f"{label} {title} {name}"
        segments = [Segment(mean(values), colors[name], gid)] if values else []
        status = next((row["status"] for row in draws if row["status"] != "ok"), "ok")
        bars.append(Bar(segments, gid, spread(values), status))
        names.append(name.replace("_", " "))
    return Panel(partial(draw_levels, bars=bars, names=names), title, label, inches=levels_inches(len(bars)))


def spread(values: Sequence[float]) -> str:
    """The mean of values, and in parentheses their range if its ends differ as text; "" without values."""
    if not values:
        return ""
    least, most = number(min(values)), number(max(values))
    return number(mean(values)) + (f" ({least} to {most})" if least != most else "")


draw_placement_imbalance = Drawing("placement_imbalance", placement_imbalance)
"""Work and step of the ranks of a ring by placement, over draws of packed documents."""
