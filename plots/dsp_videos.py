"""Panels by video, over the number of GPUs: for the throughput and the latency of DSP (arXiv 2403.10266)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from pandas import DataFrame

from spbench.plots.axes import GPUS, LENGTHS
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import Line, PlottedQuantity, Value, line_grid, lines_of
from spbench.plots.series import Row, gpus, grouped, model, option, shared

#: the dim of the grid that a method splits throughout -> its name
_SPLITS = {0: "frames cut", 1: "places cut"}
#: relative difference that cannot be seen
_ALIKE = 1e-3


def videos(
    rows: Sequence[Row], comparison: DataFrame, quantity: PlottedQuantity, default_title: str
) -> PanelGrid:
    """A panel for each model, cluster and video, shorter ones first; a line for each strategy and dim that it
    splits.

    Args:
        default_title: the title if the rows name no scenario.
    """
    differing = [name for name in ("model", "cluster") if shared(rows, name) is None]
    in_order = sorted(rows, key=lambda row: (model(row), LENGTHS.at(row)))
    of_video = grouped(
        in_order, lambda row: ", ".join([*(str(row["cell"].get(n)) for n in differing), video(row)])
    )
    facets = {name: lines_of(some, GPUS, _split) for name, some in of_video.items()}
    remarks = list(_one_over_the_other(facets, quantity.value))
    return line_grid(rows, facets, [quantity], comparison, default_title, GPUS, remarks)


def video(row: Row) -> str:
    """The shape of a row's video in the latent space: frames, and places of each."""
    positions, frames = LENGTHS.at(row), option(row, "model_options", "temporal")
    if not frames:
        return f"{positions} latent positions"
    return f"{frames} frames of {positions // frames} places"


def _one_over_the_other(panels: Mapping[str, Sequence[Line]], value: Value) -> Iterator[str]:
    """A sentence for each two lines of one look that lie on each other, with the panels where they do."""
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


def _split(row: Row) -> str:
    dim = option(row, "strategy_options", "grid_dim")
    return "" if dim is None else _SPLITS.get(dim, f"dim {dim} cut")
