"""The pictures of docs/ and of results/ that no scenario draws.

    python scripts/pictures.py scatter      # predicted_and_measured.png
    python scripts/pictures.py terminal     # advise_in_a_terminal.svg; runs `spbench advise`, about a minute
    python scripts/pictures.py report       # report.png; builds the report, and needs Chromium and Playwright
    python scripts/pictures.py --check      # exit code 1 if the scatter is older than its numbers

The scatter has a point for each published step time and memory value, our number over the published one, and
a line for each source. The picture keeps a digest of its numbers, which --check compares with the CSV files
of results/reproduction. CHROMIUM may name the program of Chromium.
"""

import fcntl
import hashlib
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from pandas import DataFrame, Series, concat
from PIL import Image, PngImagePlugin
from rich.console import Console
from rich.text import Text

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
#: by kind of a point's rates, as the legend names it: the classes of rates, and the colour
KINDS = {
    "rates from benchmarks": (("sourced", "extrapolated", "transferred"), "#355ba9"),
    "fitted rates": (("fitted", "fitted elsewhere"), "#009265"),
    "substituted rates": (("substituted",), "#cc7f00"),
    "same runs, datasheets only": (("datasheet",), "#666666"),
    "another program simulated": ((), "#b1380a"),
}
MEMORY, DATASHEETS_ONLY = "#355ba9", "same runs, datasheets only"
#: names of publishers for readers, by the names of :func:`publishers`
NAMES = {"EXPERTS": "Megatron-LM's test of an expert layer", "LASP2": "LASP-2"}
MEMORY_QUANTITIES = ("peak_memory", "reserved_memory", "allocated", "memory_")
#: inches of a line; the ends of both axes; half the width of the shaded band, as a relative error
LINE, TIME_ENDS, MEMORY_ENDS, NEAR = 0.155, (0.09, 24.0), (0.5, 1.4), 0.10


def kind_of(rates: str) -> str:
    """The kind of a step time's rates, as the legend names it, by the class of the rates."""
    return next((kind for kind, (classes, _) in KINDS.items() if rates in classes), [*KINDS][-1])


def sources_of(records: DataFrame) -> "Series[str]":
    """The publisher of each record's number."""
    return records["source"].map(publishers()).replace(NAMES)


def times() -> DataFrame:
    """A row for each published step time on which no scalar was fitted: source, ratio and kind of rates."""
    files = [RESULTS / f"{name}.csv" for name in [*papers(), DATASHEETS]]
    records = counted_times(files)
    ratios = np.exp(log_errors(records))
    kinds = records["rates"].map(kind_of)
    return DataFrame({"source": sources_of(records), "ratio": ratios, "kind": kinds}).reset_index(drop=True)


def memory() -> DataFrame:
    """A row for each published memory value and each golden value of Megatron-LM's tests: source and
    ratio."""
    records = joined(distinct(read_comparisons(RESULTS / f"{name}.csv")) for name in papers())
    records = records[
        records["quantity"].str.startswith(MEMORY_QUANTITIES) & records["relative_error"].notna()
    ]
    compared = DataFrame({"source": sources_of(records), "ratio": 1 + records["relative_error"]})
    ratios = [1 + float(case["error"]) for case in read_csv(RESULTS / f"{CASES}_errors.csv")[1]]
    golden = DataFrame({"source": "Megatron-LM's functional tests", "ratio": ratios})
    return concat([compared, golden]).reset_index(drop=True).assign(kind="memory")


def draw_lines(ax: Axes, points: DataFrame, ends: tuple[float, float], ticks: Sequence[float]) -> None:
    """Draw a line for each source, in ascending median error; labels have the number of points and the
    error."""
    counted = points[points["kind"] != DATASHEETS_ONLY]
    errors = (counted["ratio"] - 1).abs().groupby(counted["source"])
    order = errors.median().sort_values(kind="stable")
    places = {source: at for at, source in enumerate(order.index)}
    colors = {kind: color for kind, (_, color) in KINDS.items()} | {"memory": MEMORY}
    for (source, kind), some in points.groupby(["source", "kind"], sort=True):
        # the points are spread over the line's height, because many of them would overlap
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
    """The text of a median error: "0.016%", "8.31%", "109%"."""
    return f"{100 * error:.3g}%"


def digest(*tables: DataFrame) -> str:
    """A digest of the numbers that the picture shows."""
    text = "".join(table.to_csv(index=False, float_format="%.9g") for table in tables)
    return hashlib.sha256(text.encode()).hexdigest()


def draw() -> None:
    """Write the picture of the scatter, with the digest of its numbers."""
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


IMAGES = Path("docs", "images")
#: the line of the answer with the seconds of the search, which differ from machine to machine
SECONDS = r"^.*layouts looked at in .*$"
COLUMNS, REPORT_PIXELS = 118, (1400, 1120)
ADVISE = (
    "spbench advise --model llama3-8b --cluster dgx-h100 --gpus 8 --seq-len 128K --batch 1 "
    "--only ulysses,ring_attention,ulysses+ring_attention,zero3 --fixed dp=1 "
    "--set model_options.recompute=full"
)


def in_a_terminal(command: str) -> str:
    """The text that a command prints on a terminal of :data:`COLUMNS` columns, with escape codes, but without
    progress."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(
        shlex.split(command), stdout=its, stderr=subprocess.DEVNULL, env=environment
    ) as ran:
        os.close(its)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # the program has ended
            pass
    os.close(ours)
    if ran.returncode:
        sys.exit(f"exit code {ran.returncode}: {command}")
    return b"".join(parts).decode().replace("\r", "")


def draw_terminal() -> None:
    """Write the answer of `spbench advise` as a picture that loads no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {ADVISE}", style="bold", soft_wrap=False, highlight=False)
    answer = re.sub(SECONDS, "", in_a_terminal(ADVISE), flags=re.MULTILINE)
    console.print(Text.from_ansi(answer))
    svg = console.export_svg(title="spbench advise", unique_id="advise")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (IMAGES / "advise_in_a_terminal.svg").write_text(svg, encoding="utf-8")


def draw_report() -> None:
    """Write the picture of the first screen of the report on the committed results."""
    from playwright.sync_api import sync_playwright  # of the extra `test`

    program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        site = Path(folder, "site")
        subprocess.run(["spbench", "report", "--output", str(site)], check=True, stdout=subprocess.DEVNULL)
        switches = ["--no-sandbox", "--single-process", "--no-zygote", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=program, args=switches)
        width, height = REPORT_PIXELS
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        tab.goto((site / "index.html").as_uri())
        picture = IMAGES / "report.png"
        tab.screenshot(path=picture)
        browser.close()
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(picture, "png", optimize=True)


DRAWN = {"scatter": draw, "terminal": draw_terminal, "report": draw_report}

if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0 if is_current() else f"{PICTURE} is older than its numbers: python scripts/pictures.py scatter"
        )
    for name in sys.argv[1:] or DRAWN:
        DRAWN[name]()
