"""Errors of outputs and gradients against float64, by ranks: what a method costs in bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pandas import DataFrame

from spbench.plots.axes import GPUS
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import PlottedQuantity, Value, line_grid, lines_of
from spbench.plots.series import Row, backend, grouped, model, option
from spbench.plots.style import backend_name

_KINDS = {
    "causal_attention": "Causal softmax attention",
    "attention": "Softmax attention by all scores",
    "linear_attention": "Causal linear attention",
}
#: the precision that is drawn: others have the same curves at other heights
_PRECISION = "bf16"


def _errors(row: Row) -> Mapping[str, float]:
    return row["measurement"].get("errors") or {} if row["status"] == "ok" else {}


def _largest(names: Sequence[str]) -> Value:
    """The largest of these errors of a row."""
    return lambda row: max((error for name, error in _errors(row).items() if name in names), default=None)


_QUANTITIES = (
    PlottedQuantity(
        "error_of_outputs",
        "Error of outputs\n(of a model: worst gradient)",
        _largest(["o", "worst_gradient"]),
        logarithmic=True,
    ),
    PlottedQuantity(
        "error_of_gradients",
        "Error of gradients\n(the largest of d_q, d_k, d_v)",
        _largest(["d_q", "d_k", "d_v", "gradients"]),
        logarithmic=True,
    ),
)


def _facet(row: Row) -> str:
    """What a row is of."""
    if "call" not in model(row):
        return "A small model: all gradients"
    return _KINDS[option(row, "model_options", "kind", "causal_attention")]


def _setting(row: Row) -> str:
    """What tells a row from others of its strategy."""
    placement = option(row, "strategy_options", "placement", "")
    summed = "" if "call" in model(row) or row["cell"]["strategy"] == "single" else backend_name(backend(row))
    return summed or ("" if placement == "zigzag" else placement)


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    drawn = [row for row in rows if row["cell"]["precision"] == _PRECISION]
    facets = {name: lines_of(some, GPUS, _setting) for name, some in sorted(grouped(drawn, _facet).items())}
    remarks = [f"Relative to float64, in {_PRECISION}; one GPU is what a device's own arithmetic costs"]
    return line_grid(drawn, facets, _QUANTITIES, comparison, "Errors by ranks", GPUS, remarks)


draw = Drawing("numerics", _grid)
