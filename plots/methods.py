"""Comparisons of methods: throughput and peak memory over lengths, for any scenario with such measurements,
and errors against float64 by number of ranks."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from pandas import DataFrame

from spbench.plots.axes import GPUS, LENGTHS
from spbench.plots.communication import sent_bytes
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, Line, PlottedQuantity, Value, line_grid, lines_of, measured
from spbench.plots.series import (
    Row,
    backend,
    differing_settings,
    gpus,
    gpus_of,
    grouped,
    model,
    option,
    settings,
    strategy,
)
from spbench.plots.style import backend_name, model_name, strategy_name

_PEAK = PlottedQuantity("peak_memory_gib", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30))
_SENT = PlottedQuantity("sent", "Sent (GiB)", lambda r: (n := sent_bytes(r, "communication")) and n / 2**30)
#: in points, the shift between lines of a panel, so that equal lines are seen, and the most of all shifts
_APART, _SPREAD = 3.0, 20.0


def _interval(row: Row) -> tuple[float, float] | None:
    """The lowest and highest throughput (tokens/s) in a simulated time's interval; None without one."""
    step_time_s, low, high = (row["measurement"].get(f"step_time_{end}s") for end in ("", "low_", "high_"))
    if not (low and high):
        return None
    tokens = row["measurement"]["tokens_per_s"] * step_time_s
    return tokens / high, tokens / low


def methods(rows: Sequence[Row], comparison: DataFrame, *others: PlottedQuantity) -> PanelGrid:
    """A column for each model, number of GPUs and cluster, and for each batch if several were measured at one
    length. Notes name the strategies without a number, with their reasons.

    Args:
        rows: result rows; rows of searches are left out.
        others: quantities below throughput and peak memory.
    """
    rows = [row for row in rows if row["cell"].get("seq_len") and not row["cell"].get("search")]
    numbered = {strategy(row) for row in rows if row["status"] in ("ok", "oom")}
    rows_drawn = [row for row in rows if strategy(row) in numbered]
    facets = {}
    for (of_model, ranks, cluster), some in sorted(grouped(rows_drawn, _machine).items()):
        name = f"{of_model}, {gpus_of(cluster, ranks)}"
        places = grouped(some, lambda row: (strategy(row), LENGTHS.at(row)))
        # batches that grow as lengths shrink share one column
        several = any(len(set(map(_batch, at))) > 1 for at in places.values())
        for batch, of_batch in sorted(grouped(some, _batch).items()) if several else [(0, some)]:
            layout = differing_settings(of_batch, ("seq_len", "batch"), LENGTHS.at, _settings)
            if any(row["status"] in ("ok", "oom") for row in of_batch):
                facets[f"{name}, batch {batch}" if several else name] = _beside(
                    lines_of(of_batch, LENGTHS, layout)
                )
    remarks = [f"Not drawn: {lost}" for lost in _without_numbers(rows, numbered)]
    if any(map(_interval, rows_drawn)):
        remarks.append("Bars: what such predictions of a step have been off by")
    quantities = [replace(TOKENS_PER_SECOND, interval=_interval), _PEAK, *others]
    return line_grid(
        rows_drawn, facets, quantities, comparison, "Methods by sequence length", LENGTHS, remarks
    )


def _machine(row: Row) -> tuple[str, int, str]:
    return model_name(model(row)), gpus(row), str(row["cell"]["cluster"])


def _batch(row: Row) -> int:
    return row["cell"].get("batch") or 0


def _beside(lines: Sequence[Line]) -> list[Line]:
    """The lines, each shifted a little to the right of the line before."""
    apart = min(_APART, _SPREAD / max(1, len(lines) - 1))
    return [replace(line, aside=apart * (i - (len(lines) - 1) / 2)) for i, line in enumerate(lines)]


def _without_numbers(rows: Sequence[Row], numbered: Collection[str]) -> Iterator[str]:
    """A text for each status and reason with the names of the strategies that have no number."""
    lost: dict[str, dict[str, None]] = {}
    for row in rows:
        if (name := strategy(row)) not in numbered:
            reason = (row.get("reason") or "").partition(";")[0].removeprefix(f"{name} ")
            lost.setdefault(f"{row['status']}{f' ({reason})' if reason else ''}", {})[name] = None
    for why, names in lost.items():
        yield f"{', '.join(map(strategy_name, names))}: {why}"


def _settings(row: Row) -> dict[str, object]:
    sizes = {axis: n for axis, n in (row["cell"].get("sizes") or {}).items() if n > 1}
    alike = {name: value for name, value in settings(row).items() if name not in ("dp", "pp")}
    return {"sizes": "x".join(f"{axis}{n}" for axis, n in sizes.items()), **alike}


draw = Drawing("methods", methods, "measurements at a given sequence length")
"""Throughput and peak memory by sequence length, a line for each strategy."""

draw_method_costs = Drawing("method_costs", lambda *drawn: methods(*drawn, _SENT), draw.of)
"""Throughput, peak memory and sent bytes by sequence length, a line for each strategy."""


# -- errors against float64 ------------------------------------------------------------------------------

_KINDS = {
    "causal_attention": "Causal softmax attention",
    "attention": "Softmax attention by all scores",
    "linear_attention": "Causal linear attention",
}
#: the precision that is drawn, because other precisions have the same curves at other heights
_PRECISION = "bf16"


def _errors(row: Row) -> Mapping[str, float]:
    return row["measurement"].get("errors") or {} if row["status"] == "ok" else {}


def _largest(names: Sequence[str]) -> Value:
    """A function from a row to the largest of its errors with these names; None without such errors."""
    return lambda row: max((error for name, error in _errors(row).items() if name in names), default=None)


_QUANTITIES = tuple(
    PlottedQuantity(name, f"Error of {label}", _largest(errors.split()), logarithmic=True)
    for name, label, errors in (
        ("error_of_outputs", "outputs\n(of a model: worst gradient)", "o worst_gradient"),
        ("error_of_gradients", "gradients\n(the largest of d_q, d_k, d_v)", "d_q d_k d_v gradients"),
    )
)


def _facet(row: Row) -> str:
    """The title of a row's panel: the kind of attention, or "a small model"."""
    if "call" not in model(row):
        return "A small model: all gradients"
    return _KINDS[option(row, "model_options", "kind", "causal_attention")]


def _setting(row: Row) -> str:
    """The setting in which a row differs from others of its strategy: its backend or placement; or ""."""
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
