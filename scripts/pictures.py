"""The pictures of README.md, docs/trust.md and the report that show all committed results at once.

    python scripts/pictures.py             # draws them
    python scripts/pictures.py --check     # exit code 1 if one is older than its numbers

predicted_and_measured.png has a point for each published step time and memory value: ours over the published
number, a line for each source. A picture keeps a digest of its numbers, which --check compares with the CSV
files of results/reproduction.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from pandas import DataFrame, Series, concat
from PIL import Image, PngImagePlugin

from spbench.bench.tools.papers.comparison import joined, read_comparisons, read_csv
from spbench.bench.tools.papers.megatron_cases import CASES
from spbench.bench.tools.papers.paper_findings import distinct
from spbench.bench.tools.papers.past_errors import DATASHEETS, counted_times, log_errors
from spbench.bench.tools.papers.sources import papers, publishers
from spbench.plots.axes import marker_line
from spbench.plots.paper import PAGE_INCHES, add_legend, house_style, new_figure, save_as
from spbench.plots.style import GREY, shortened

RESULTS = Path("results", "reproduction")
PICTURE = RESULTS / "figures" / "predicted_and_measured.png"
#: by what a point rests on: classes of rates, and the colour
KINDS = {
    "rates from benchmarks": (("sourced", "extrapolated", "transferred"), "#355ba9"),
    "fitted rates": (("fitted", "fitted elsewhere"), "#009265"),
    "substituted rates": (("substituted",), "#cc7f00"),
    "same runs, datasheets only": (("datasheet",), "#666666"),
    "another program simulated": ((), "#b1380a"),
}
MEMORY, DATASHEETS_ONLY = "#355ba9", "same runs, datasheets only"
#: by the names of :func:`publishers` that are no names for people
NAMES = {"EXPERTS": "Megatron-LM's test of an expert layer", "LASP2": "LASP-2"}
MEMORY_QUANTITIES = ("peak_memory", "reserved_memory", "allocated", "memory_")
#: inches of a line; the ends of the axes; the shaded band
LINE, TIME_ENDS, MEMORY_ENDS, NEAR = 0.155, (0.09, 24.0), (0.5, 1.4), 0.10


def kind_of(rates: str) -> str:
    """What a time's rates rest on, as the legend has it."""
    return next((kind for kind, (classes, _) in KINDS.items() if rates in classes), [*KINDS][-1])


def sources_of(records: DataFrame) -> Series[str]:
    """Who published each number."""
    return records["source"].map(publishers()).replace(NAMES)


def times() -> DataFrame:
    """A line for each published step time that no scalar was fitted to: source, ratio and kind of rates."""
    files = [RESULTS / f"{name}.csv" for name in [*papers(), DATASHEETS]]
    records = counted_times(files)
    ratios = np.exp(log_errors(records))
    kinds = records["rates"].map(kind_of)
    return DataFrame({"source": sources_of(records), "ratio": ratios, "kind": kinds}).reset_index(drop=True)


def memory() -> DataFrame:
    """A line for each published memory value, and for each golden value of Megatron-LM's tests."""
    records = joined(distinct(read_comparisons(RESULTS / f"{name}.csv")) for name in papers())
    records = records[
        records["quantity"].str.startswith(MEMORY_QUANTITIES) & records["relative_error"].notna()
    ]
    compared = DataFrame({"source": sources_of(records), "ratio": 1 + records["relative_error"]})
    ratios = [1 + float(case["error"]) for case in read_csv(RESULTS / f"{CASES}_errors.csv")[1]]
    golden = DataFrame({"source": "Megatron-LM's functional tests", "ratio": ratios})
    return concat([compared, golden]).reset_index(drop=True).assign(kind="memory")


def draw_lines(ax: Axes, points: DataFrame, ends: tuple[float, float], ticks: Sequence[float]) -> None:
    """A line for each source, the smallest median error first, with its number of points and that error."""
    counted = points[points["kind"] != DATASHEETS_ONLY]
    errors = (counted["ratio"] - 1).abs().groupby(counted["source"])
    order = errors.median().sort_values(kind="stable")
    places = {source: at for at, source in enumerate(order.index)}
    colors = {kind: color for kind, (_, color) in KINDS.items()} | {"memory": MEMORY}
    for (source, kind), some in points.groupby(["source", "kind"], sort=True):
        # an even spread over the line's height, since many points lie on each other
        spread = (np.arange(len(some)) * 0.618) % 1 * 0.6 - 0.3
        places_of = places[source] + spread
        ax.plot(some["ratio"], places_of, "o", color=colors[kind], markersize=1.8, alpha=0.6)
    ax.axvspan(1 - NEAR, 1 + NEAR, color=GREY, alpha=0.18, linewidth=0)
    ax.axvline(1, color=GREY, linewidth=0.7)
    counts = errors.size()
    labels = [f"{shortened(source, 46)}: {counts[source]}, {percent_of(order[source])}" for source in places]
    ax.set_yticks(range(len(places)), labels)
    ax.set(xscale="log", xlim=ends, ylim=(len(places) - 0.4, -0.6), xlabel="ours / published")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


def percent_of(error: float) -> str:
    """A median error: "0.016%", "8.31%", "109%"."""
    return f"{100 * error:.3g}%"


def digest(*tables: DataFrame) -> str:
    """A digest of the numbers that the picture shows."""
    text = "".join(table.to_csv(index=False, float_format="%.9g") for table in tables)
    return hashlib.sha256(text.encode()).hexdigest()


def draw() -> None:
    """Write the picture, with the digest of its numbers."""
    steps, peaks = times(), memory()
    lines = [table["source"].nunique() for table in (peaks, steps)]
    with house_style():
        figure = new_figure(PAGE_INCHES, LINE * sum(lines) + 1.5, "")
        upper, lower = figure.subplots(2, gridspec_kw={"height_ratios": lines})
        draw_lines(upper, peaks, MEMORY_ENDS, (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3))
        draw_lines(lower, steps, TIME_ENDS, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20))
        upper.set_title(f"{len(peaks):,} values of memory (each source: number, median error)", loc="left")
        lower.set_title(
            f"{len(steps):,} simulated step times (each source: number, median error)",
            loc="left",
        )
        add_legend(figure, [marker_line(kind, color) for kind, (_, color) in KINDS.items()])
    save_as(figure, PICTURE)
    marks = PngImagePlugin.PngInfo()
    marks.add_text("numbers", digest(steps, peaks))
    with Image.open(PICTURE) as image:
        image.load()
        image.save(PICTURE, "png", optimize=True, dpi=image.info["dpi"], pnginfo=marks)


def is_current() -> bool:
    """Whether the committed picture shows the committed numbers."""
    with Image.open(PICTURE) as image:
        return bool(image.info.get("numbers") == digest(times(), memory()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if is_current() else f"{PICTURE} is older than its numbers: python scripts/pictures.py")
    draw()
