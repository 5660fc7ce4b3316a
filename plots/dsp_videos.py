"""Panels by video, over the number of GPUs: for the throughput and the latency of DSP (arXiv 2403.10266)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import GPUS
from spbench.plots.line_panels import Line, Quantity, line_panels, lines_of
from spbench.plots.lines import Value
from spbench.plots.series import Row, gpus
from spbench.plots.style import looks

#: which dim of the grid a method cuts that cuts one throughout
_CUTS = {0: "frames cut", 1: "places cut"}
#: relative difference that is not seen
_ALIKE = 1e-3


def videos_figure(rows: Sequence[Row], quantity: Quantity, comparison: DataFrame, otherwise: str) -> Figure:
    """A panel for each model and video, shorter ones first; a line for each strategy and dim that it cuts.

    Args:
        comparison: the table of comparison.csv; may be empty.
        otherwise: a title, where the rows name no scenario.
    """
    look = looks(row["cell"]["strategy"] for row in rows)
    models = {row["cell"]["model"] for row in rows}
    videos: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["cell"]["model"], int(row["cell"]["seq_len"]))):
        name = video(row) if len(models) == 1 else f"{row['cell']['model']}, {video(row)}"
        videos.setdefault(name, []).append(row)
    panels = {name: list(lines_of(some, look, GPUS, _cut)) for name, some in videos.items()}
    remarks = list(_one_over_the_other(panels, quantity.value))
    return line_panels(rows, panels, [quantity], comparison, otherwise, GPUS, remarks)


def video(row: Row) -> str:
    """The shape of a row's video in the latent space: frames, and places of each."""
    positions, frames = int(row["cell"]["seq_len"]), _options(row, "model_options").get("temporal")
    if not frames:
        return f"{positions} latent positions"
    return f"{frames} frames of {positions // frames} places"


def _one_over_the_other(panels: Mapping[str, Sequence[Line]], value: Value) -> Iterator[str]:
    """A line of text on each two lines of one strategy of which only one is seen, as they are alike."""
    where: dict[str, list[str]] = {}
    for name, lines in panels.items():
        for line, other in combinations(lines, 2):
            values, others = ({gpus(row): value(row) for row in of.rows} for of in (line, other))
            alike = line.look == other.look and values.keys() == others.keys()
            if alike and all(_alike(values[count], others[count]) for count in values):
                where.setdefault(f"{line.name} and {other.name}", []).append(name)
    for names, those in where.items():
        yield f"{names} are alike within {_ALIKE:.1%}: {', '.join(those)}"


def _alike(value: float | None, other: float | None) -> bool:
    return value == other if value is None or other is None else abs(value - other) <= _ALIKE * other


def _cut(row: Row) -> str:
    dim = _options(row, "strategy_options").get("grid_dim")
    return "" if dim is None else _CUTS.get(dim, f"dim {dim} cut")


def _options(row: Row, name: str) -> dict[str, int]:
    return row["cell"].get(name) or {}
