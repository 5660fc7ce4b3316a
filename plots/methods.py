"""Methods beside each other: throughput and peak memory over lengths, for any scenario that measures them,
and errors against float64 by ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pandas import DataFrame

from spbench.plots.axes import GPUS, LENGTHS
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, PlottedQuantity, Value, line_grid, lines_of, measured
from spbench.plots.series import Row, backend, differing, gpus, grouped, model, option, settings, strategy
from spbench.plots.style import TIMES, backend_name, model_name

_PEAK = PlottedQuantity("peak_memory_gib", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30))


def methods(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each model, cluster and number of GPUs.

    Args:
        rows: those of searches have no step, and are left out.
    """
    rows = [row for row in rows if row["cell"].get("seq_len") and not row["cell"].get("search")]
    facets = {name: lines_of(some, LENGTHS, _layout(some)) for name, some in grouped(rows, _machine).items()}
    return line_grid(rows, facets, [TOKENS_PER_SECOND, _PEAK], comparison, "Methods by sequence length")


def _machine(row: Row) -> str:
    return f"{model_name(model(row))}, {gpus(row)} {TIMES} {row['cell']['cluster']}"


def _layout(rows: Sequence[Row]) -> Callable[[Row], str]:
    """What tells rows of one strategy and length apart, as text: the sizes along axes, and settings; "" for
    strategies with one row a length."""
    names = {
        of: [name for name in differing(list(map(_settings, some))) if name != "seq_len"]
        for of, some in grouped(rows, strategy).items()
        if len(set(map(LENGTHS.at, some))) < len(some)
    }

    def text(row: Row) -> str:
        of_row = _settings(row)
        return ", ".join(str(of_row.get(name)) for name in names.get(strategy(row), ()))

    return text


def _settings(row: Row) -> dict[str, object]:
    sizes = {axis: n for axis, n in (row["cell"].get("sizes") or {}).items() if n > 1}
    alike = {name: value for name, value in settings(row).items() if name not in ("dp", "pp")}
    return {"sizes": "x".join(f"{axis}{n}" for axis, n in sizes.items()), **alike}


draw = Drawing("methods", methods, "measurements at a given sequence length")
"""Throughput and peak memory by sequence length, a line for each strategy."""


# -- errors against float64 ------------------------------------------------------------------------------

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


def _numerics(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    drawn = [row for row in rows if row["cell"]["precision"] == _PRECISION]
    facets = {name: lines_of(some, GPUS, _setting) for name, some in sorted(grouped(drawn, _facet).items())}
    remarks = [f"Relative to float64, in {_PRECISION}; one GPU is what a device's own arithmetic costs"]
    return line_grid(drawn, facets, _QUANTITIES, comparison, "Errors by ranks", GPUS, remarks)


draw_numerics = Drawing("numerics", _numerics)
"""Errors of outputs and gradients against float64 by number of GPUs, a line for each strategy."""
