"""The figure of methods beside each other, for any scenario that measures them over lengths: throughput and
peak memory, a line for each strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pandas import DataFrame

from spbench.plots.axes import LENGTHS
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, PlottedQuantity, line_grid, lines_of, measured
from spbench.plots.series import Row, differing, gpus, grouped, model, settings, strategy
from spbench.plots.style import TIMES

_PEAK = PlottedQuantity("peak_memory_gib", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30))


def methods(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each model, cluster and number of GPUs.

    Args:
        rows: those of searches have no step, and are left out.
    """
    rows = [row for row in rows if row["cell"].get("seq_len") and not row["cell"].get("search")]
    facets = {name: lines_of(some, LENGTHS, _setting(some)) for name, some in grouped(rows, _machine).items()}
    return line_grid(rows, facets, [TOKENS_PER_SECOND, _PEAK], comparison, "Methods by sequence length")


def _machine(row: Row) -> str:
    return f"{model(row)}, {gpus(row)} {TIMES} {row['cell']['cluster']}"


def _setting(rows: Sequence[Row]) -> Callable[[Row], str]:
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
