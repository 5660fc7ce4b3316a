"""Figures of LASP (arXiv 2404.02882) and LASP-2 (arXiv 2502.07563): over the length, and ablations."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from pandas import DataFrame

from spbench.plots.axes import LENGTHS, lost_notes
from spbench.plots.bars import draw_rows, method_patches
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, Line, PlottedQuantity, line_grid, lines_of, measured
from spbench.plots.sent_elements import sent_elements
from spbench.plots.series import (
    Row,
    backend,
    by_model,
    gpu_counts,
    gpus,
    grouped,
    model,
    option,
    searches_for,
    shared,
    strategy,
    title,
)
from spbench.plots.style import MARKERS, Look, backend_name, length_text, looks, model_name, strategy_name

_MEMORY = PlottedQuantity("memory_gb", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30))
#: the name of each order of a baseline's matmuls of linear attention; LASP and LASP-2 have one order
_ORDERS = {"left_product": "QKᵀ first", "chunked": "KᵀV first"}
_ONE_ORDER = ("lasp", "lasp2")
_OPTIONS = ("kernel_fusion", "state_caching")

#: the name of each combination of (kernels are fused, states are cached), in the order of the bars
_COMBINATIONS = {
    (True, True): "fused,\ncached",
    (True, False): "fused",
    (False, True): "cached",
    (False, False): "neither",
}
_ABLATED = (
    replace(_MEMORY, column="memory"),
    PlottedQuantity("throughput", "Tokens per second", measured("tokens_per_s")),
)
_LENGTH = PlottedQuantity("length", "Longest sequence\n(K tokens, K = 1024)", measured("answer", 1024))


def _scalability(rows: Sequence[Row], comparison: DataFrame, default_title: str) -> PanelGrid:
    """A column for each model and data-parallel backend, with a line for each number of GPUs, from dark to
    light."""
    counts = gpu_counts(rows)
    # the light end of the colour map is left out
    colors = [to_hex(mpl.colormaps["viridis"](0.75 * at / len(counts))) for at in range(len(counts))]
    look = {n: Look(colors[at], MARKERS[at % len(MARKERS)]) for at, n in enumerate(counts)}
    facets = {}
    for name, of_model in by_model(rows).items():
        for of, some in grouped(of_model, backend).items():
            facets[f"{name}, {backend_name(of)}"] = [
                Line(f"{count} GPUs", look[count], tuple(sorted(of_count, key=LENGTHS.at)))
                for count, of_count in sorted(grouped(some, gpus).items())
            ]
    return line_grid(rows, facets, (_MEMORY, TOKENS_PER_SECOND), comparison, default_title)


def _speed(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each model and cluster, a line for each strategy and order of linear attention's matmuls.
    A cluster whose name extends another cluster's shares the other's panel."""
    clusters = sorted({row["cell"]["cluster"] for row in rows})
    facets = {}
    for name, some in by_model(rows).items():
        for cluster, those in grouped(some, lambda row: _family(row["cell"]["cluster"], clusters)).items():
            facets[f"{name}, {cluster}"] = lines_of(those, LENGTHS, _matmul_order)
    return line_grid(rows, facets, [TOKENS_PER_SECOND], comparison, "Throughput by sequence length")


def _family(cluster: str, clusters: Sequence[str]) -> str:
    """The cluster whose panel ``cluster`` shares: the one whose name this name extends, or itself."""
    if any(name.startswith(f"{cluster}-") for name in clusters):
        return cluster
    return max((name for name in clusters if cluster.startswith(f"{name}-")), key=len, default=cluster)


def _matmul_order(row: Row) -> str:
    """The order of the matmuls of linear attention; "" for strategies that have one order."""
    order = str(option(row, "model_options", "linear_attention", "chunked"))
    return "" if strategy(row) in _ONE_ORDER else _ORDERS.get(order, order)


def _ablation(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """Panels of memory and throughput of each combination of options, and below a panel of the longest
    sequences. Rows that neither set one of LASP's options nor search for the length are left out; the
    comparison is not used."""
    combined = [row for row in rows if set(_OPTIONS) & set(row["cell"].get("strategy_options") or {})]
    searches = [row for row in rows if searches_for(row, "seq_len")]
    lost = [row for row in [*combined, *searches] if row["status"] != "ok"]
    grid = PanelGrid(
        title(rows, "Kernel fusion, state caching and memory"), list(_notes(combined, searches)), lost
    )
    if combined:
        grid.add([[_combinations(combined, quantity)] for quantity in _ABLATED], abreast=2)
    if searches:
        grid.add([[_lengths(searches)]])
    return grid


def _combination(row: Row) -> str:
    """The name of the row's combination; both options are on unless they are turned off."""
    fusion, caching = (bool(option(row, "strategy_options", name, True)) for name in _OPTIONS)
    return _COMBINATIONS[fusion, caching]


def _combinations(rows: Sequence[Row], quantity: PlottedQuantity) -> Panel:
    by_name = {_combination(row): row for row in rows}
    shown = {name: [by_name[name]] for name in _COMBINATIONS.values() if name in by_name}
    draw_panel = partial(draw_rows, places=shown, value=quantity.value, quantity=quantity.column)
    return Panel(draw_panel, _shared_title(rows), y_label=quantity.axis_label, axis="linear")


def _lengths(rows: Sequence[Row]) -> Panel:
    """The panel of longest sequences: bars of the strategies for each way to save memory."""
    methods = sorted(set(map(strategy, rows)), key=lambda name: (name != "single", name))
    ways = {
        way: sorted(some, key=lambda row: methods.index(strategy(row)))
        for way, some in grouped(rows, _saving).items()
    }

    def draw_panel(ax: Axes) -> Drawn:
        drawn = draw_rows(
            ax, ways, _LENGTH.value, _LENGTH.column, lambda value: length_text(int(1024 * value))
        )
        look = looks(methods)
        return replace(drawn, methods=method_patches({name: look[name] for name in methods}, _method))

    heading = f"{_shared_title(rows)}: longest sequence that fits"
    return Panel(draw_panel, heading, y_label=_LENGTH.axis_label, axis="linear")


def _saving(row: Row) -> str:
    """How a row saves memory besides its strategy: the backend's name, and "recomputed" for checkpointing."""
    checkpointing = option(row, "model_options", "checkpointing", False)
    return backend_name(backend(row)) + (",\nrecomputed" if checkpointing else "")


def _method(name: str) -> str:
    return "data parallel only" if name == "single" else strategy_name(name)


def _shared_title(rows: Sequence[Row]) -> str:
    """The model, the number of GPUs and the length as text; each only if all rows have the same."""
    length, counts = shared(rows, "seq_len"), gpu_counts(rows)
    name = shared(rows, "model")
    parts = [name and model_name(name), f"{counts[0]} GPUs" if len(counts) == 1 else None]
    return ", ".join(map(str, filter(None, [*parts, f"{length_text(length)} tokens" if length else None])))


def _notes(combined: Sequence[Row], searches: Sequence[Row]) -> Iterator[str]:
    named = [(_combination(row).replace("\n", " "), row) for row in combined]
    named += [(f"{_method(strategy(row))}, {_saving(row)}".replace("\n", " "), row) for row in searches]
    return lost_notes(named)


draw_lasp_scalability = Drawing(
    "lasp_scalability", partial(_scalability, default_title="Memory and throughput of LASP")
)
"""Memory and throughput by sequence length and GPUs: LASP (arXiv 2404.02882), scalability figures."""

draw_lasp2_scalability = Drawing(
    "lasp2_scalability", partial(_scalability, default_title="Memory and throughput of LASP-2")
)
"""Memory and throughput by sequence length and GPUs: LASP-2 (arXiv 2502.07563)."""

draw_lasp_speed = Drawing("lasp_speed", _speed)
"""Throughput by sequence length of each method: LASP (arXiv 2404.02882), speed figure."""

draw_lasp_communication = Drawing(
    "lasp_communication",
    partial(sent_elements, along=LENGTHS, facet=lambda row: f"{model_name(model(row))}, {gpus(row)} GPUs"),
)
"""What a GPU sends for a layer of linear attention by sequence length: LASP (arXiv 2404.02882), Table 1."""

draw_lasp_ablation = Drawing("lasp_ablation", _ablation)
"""What fused kernels and kept states are worth, and the longest sequence that fits: LASP
(arXiv 2404.02882), ablations."""
