"""Figures of searches: the largest batch or sequence length that fits, by number of GPUs and strategy, or
switch by switch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from spbench.plots.axes import GPUS, marker_line, set_ticks, set_ticks_within, status_mark, write_beside
from spbench.plots.bars import Bar, Segment, bar_width, draw_bars
from spbench.plots.claims import DrawnClaim, claims_of, claims_panel
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.lines import (
    Line,
    PlottedQuantity,
    Published,
    line_panel,
    lines_by_setting,
    measured,
    missing_notes,
    published_of,
)
from spbench.plots.series import (
    Row,
    but_length,
    by_model,
    gpu_counts,
    gpus,
    gpus_of,
    grouped,
    option,
    searches_for,
    shared,
    strategy,
    title,
)
from spbench.plots.style import GREY, INK, TIMES, binary_length, method_color, number, strategy_name

#: the width of a panel of bars, as a part of the width of a panel of lines
_BARS_WIDTH = 0.6

_answer = measured("answer")


@dataclass(frozen=True)
class Searched:
    """A field of cells that searches maximize, with its name and unit in titles and labels."""

    field: str
    name: str
    unit: str


BATCH, LENGTH = Searched("batch", "batch", "sequences"), Searched("seq_len", "sequence length", "tokens")
#: the field that is fixed in a search for the other field
GIVEN = {BATCH: LENGTH, LENGTH: BATCH}


def largest(rows: Sequence[Row], comparison: DataFrame, searched: Searched) -> PanelGrid:
    """A panel for each model, then a panel of the claims. A model that was run on one number of GPUs, and for
    which a claim states a value, has bars; other models have lines.

    Args:
        rows: result rows; rows that do not search for the field are left out.
    """
    rows = [row for row in rows if searches_for(row, searched.field)]
    claims, models = claims_of(comparison), by_model(rows)
    lines = {name: lines_by_setting(some) for name, some in models.items()}
    stated = {name: _stated_values(some, claims) for name, some in models.items()}
    lost = [row for name, some in models.items() if stated[name] for row in some if row["status"] != "ok"]
    grid = PanelGrid(
        title(rows, f"Largest {searched.name} that fits"),
        [note for name in models for note in missing_notes(name, lines[name], GPUS)],
        lost,
    )
    label = f"{searched.name.capitalize()} ({searched.unit})"
    quantity = PlottedQuantity("largest", label, _answer)
    in_order = sorted(models, key=lambda name: (bool(stated[name]), name))
    facets = []
    for name in in_order:
        given = shared(models[name], GIVEN[searched].field)
        heading = name + (f", {GIVEN[searched].name} {given}" if given else "")
        if stated[name]:
            draw = partial(_draw_bars, lines=lines[name], published=stated[name])
            x_label = f"{gpu_counts(models[name])[0]} GPUs"
            facets.append([Panel(draw, heading, x_label, label, axis="linear", width=_BARS_WIDTH)])
        else:
            published = _implied(models[name], claims)
            facets.append([line_panel(heading, lines[name], quantity, GPUS, published, "largest")])
    return grid.add(facets).add(claims_panel(claims))


def _implied(rows: Sequence[Row], claims: Sequence[DrawnClaim]) -> Published:
    """The published numbers on these rows: a published value, or a published ratio times our denominator."""
    by_key = {row["key"]: row for row in rows}
    numbers = {}
    for claim in claims:
        if claim.numerator in by_key and not claim.is_ratio:
            numbers[claim.numerator] = claim.published
        elif claim.numerator in by_key and claim.denominator in by_key:
            below = _answer(by_key[claim.denominator])
            if below is not None:
                numbers[claim.numerator] = claim.published * below
    return Published(numbers, name=f"published ratio {TIMES} our denominator")


def _stated_values(rows: Sequence[Row], claims: Sequence[DrawnClaim]) -> list[float]:
    """The published values (no ratios) of a model's rows; empty if it was run on several numbers of GPUs."""
    keys = {row["key"] for row in rows}
    stated = [claim.published for claim in claims if not claim.is_ratio and claim.numerator in keys]
    return list(dict.fromkeys(stated)) if len(gpu_counts(rows)) == 1 else []


def _draw_bars(ax: Axes, lines: Sequence[Line], published: Sequence[float]) -> Drawn:
    """Draw a bar for each published value, then a bar for each row."""
    bars = [
        Bar([Segment(value, GREY, "published", "////", 0.15)], "published", number(value), at=at)
        for at, value in enumerate(published)
    ]
    names = ["published"] * len(bars)
    for line in lines:
        for row in line.rows:
            answer = _answer(row)
            gid = f"ours {row['status'] if answer is None else 'largest'} {line.name}"
            bars.append(Bar.of(answer, line.look, gid, row["status"], number(answer or 0), len(bars)))
            names.append("ours" if len(lines) == 1 else line.name)
    return draw_bars(ax, bars, names, bar_width(1))


draw_max_batch = Drawing("max_batch", partial(largest, searched=BATCH), "searches for the largest batch")
"""The largest batch that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 3a and 7a."""

draw_max_seqlen = Drawing("max_seqlen", partial(largest, searched=LENGTH), "searches for the largest seq_len")
"""The largest sequence length that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 5a, 5b and 9."""


# -- switch by switch ------------------------------------------------------------------------------------

#: the panel's width over the longest bar, without and with prices of steps to the right
_BESIDE, _WITH_PRICES = 1.25, 1.75


def ladders(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each cluster and number of GPUs, with a bar for each search (a rung), those with the fewest
    switches first, a diamond at the published length, and the price in time of the switch that a rung adds.

    Args:
        comparison: the published lengths, and ratios of step times with a switch to those without.
    """
    searches = sorted((row for row in rows if searches_for(row, "seq_len")), key=_place)
    published = published_of(comparison, "tokens").numbers
    machines = _machines(searches)
    paid = prices(rows, comparison)
    facets = [
        [
            Panel(
                partial(_draw_ladder, rows=some, published=published, paid=paid),
                name,
                "Longest sequence (million tokens)",
                inches=0.24 + 0.16 * len(some),
            )
        ]
        for name, some in machines.items()
    ]
    lost = [row for row in searches if _answer(row) is None]
    notes = [
        "Step: how much longer it takes with what a rung adds, at the longest length timed with and without."
    ]
    # the switches' names leave no room for bars in a column
    grid = PanelGrid(
        title(searches, "The longest sequence, switch by switch"),
        notes if paid else (),
        lost=lost,
        page_only=True,
    )
    return grid.add(facets, abreast=1)


def _machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each panel by the panel's name: a panel for each cluster and number of GPUs; a single rung
    on more GPUs joins the cluster's panel of fewer GPUs."""
    panels: list[list[Row]] = []
    for (cluster, _), some in grouped(rows, _machine).items():
        if len(some) == 1 and panels and panels[-1][0]["cell"]["cluster"] == cluster:
            panels[-1] += some
        else:
            panels.append(some)
    return {gpus_of(_machine(some[0])[0], *gpu_counts(some)): some for some in panels}


def _machine(row: Row) -> tuple[str, int]:
    return str(row["cell"]["cluster"]), gpus(row)


def _place(row: Row) -> tuple[tuple[str, int], int, float]:
    """The sort key of a rung: machine, number of switches, and answer (rows come in the order they ended)."""
    return _machine(row), len([*_switches(row)]), _answer(row) or 0


def prices(rows: Sequence[Row], comparison: DataFrame) -> dict[str, str]:
    """The price in time of a rung's last switch, by the rung's :func:`but_length`: "+5.6% (1M)", from the
    longest steps that were timed with and without the switch."""
    timed = {row["key"]: row["cell"] for row in rows if row["cell"]["seq_len"]}
    by_settings: dict[str, tuple[int, str]] = {}
    entries = [] if comparison.empty else comparison[comparison["quantity"] == "ratio"].to_dict("records")
    for entry in entries:
        cell = timed.get(entry["numerator"])
        if cell is None or not entry["reproduced"] > 0:  # a missing number is NaN
            continue
        length, batch = cell["seq_len"], cell["batch"]
        step = (f"{batch} x " if batch > 1 else "") + binary_length(length)
        longest = by_settings.get(key := but_length({"cell": cell}), (0, ""))
        by_settings[key] = max(longest, (length, f"{entry['reproduced'] - 1:+.1%} ({step})"))
    return {of: text for of, (_, text) in by_settings.items()}


def switches(row: Row) -> str:
    """The switches of a row that save memory, in words: "tiled loss + Ulysses"."""
    return " + ".join(_switches(row)) or "recomputed layers"


def _switches(row: Row) -> Iterator[str]:
    if option(row, "model_options", "loss_tile"):
        yield "tiled loss"
    if strategy(row) != "single":
        yield strategy_name(strategy(row))
    if option(row, "model_options", "mlp_tile"):
        yield "tiled MLP"
    if option(row, "model_options", "checkpoints") in ("host", "save_on_cpu", "pageable"):
        yield "checkpoints on host"


def _names(rows: Sequence[Row]) -> Iterator[str]:
    """The names of a ladder's rungs: the switches that a rung adds to the rung above, or all its switches;
    and the number of GPUs if larger than above."""
    above: list[str] = []
    count = gpus(rows[0])
    for row in rows:
        own = [*_switches(row)]
        added = [each for each in own if each not in above]
        grows = above and len(own) == len(above) + len(added)
        if gpus(row) > count:
            added.append(f"{gpus(row)} GPUs")
        yield f"... + {' + '.join(added)}" if grows and added else switches(row)
        above, count = own, gpus(row)


def _draw_ladder(
    ax: Axes, rows: Sequence[Row], published: Mapping[str, float], paid: Mapping[str, str]
) -> Drawn:
    reach = 0.0
    for y, row in enumerate(rows):
        name, answer = switches(row), _answer(row)
        theirs = published.get(row["key"])
        if answer is None:
            ax.plot([0], [y], marker="x", color=INK, gid=f"ours {row['status']} {name}")
        else:
            color = method_color(strategy(row))
            ax.barh([y], [answer / 1e6], 0.62, color=color, gid=f"ours longest {name}")
        if theirs is not None:
            ax.plot([theirs / 1e6], [y], "D", markersize=4, color=INK, markerfacecolor="white")
        largest = max(each / 1e6 for each in (answer or 0, theirs or 0))
        reach = max(reach, largest)
        write_beside(ax, _length(answer), (largest, y), (5, 0), va="center", color=INK if answer else GREY)
        if price := paid.get(but_length(row)):
            # prices are aligned at the right edge of the panel
            right = ax.get_yaxis_transform()
            ax.text(0.99, y, f"step {price}", transform=right, ha="right", va="center", fontsize=7)
    ax.set_xlim(0, (_WITH_PRICES if paid else _BESIDE) * reach or 1)
    set_ticks_within(ax.xaxis, MaxNLocator(5), 0, reach or 1)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    set_ticks(ax.yaxis, range(len(rows)), [*_names(rows)])
    ax.grid(axis="y", visible=False)
    marks = [status_mark("oom")] if any(_answer(row) is None for row in rows) else []
    shown = [marker_line("published", INK, "D", "white")] if published else []
    return Drawn(published=shown, marks=marks)


def _length(tokens: float | None) -> str:
    if tokens is None:
        return "none"
    return f"{tokens / 1e6:.2g}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}K"


draw_max_seqlen_today = Drawing("max_seqlen_today", ladders)
"""The longest sequence of Llama-3-8B, switch by switch: ALST (arXiv 2506.13996), its recipes."""
