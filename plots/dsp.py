"""Figures of DSP (arXiv 2403.10266): throughput, latency, scaling, memory and communication of videos."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from matplotlib.axes import Axes
from pandas import DataFrame

from spbench.plots.axes import GPUS, LENGTHS, lost_notes
from spbench.plots.bars import draw_rows, method_patches
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, Line, PlottedQuantity, Value, line_grid, lines_of, measured
from spbench.plots.sent_elements import sent_elements
from spbench.plots.series import (
    Row,
    by_model,
    gpu_counts,
    gpus,
    grouped,
    model,
    option,
    shared,
    strategy,
    title,
)
from spbench.plots.style import length_text, looks, model_name, strategy_name

#: the number of forward passes that generate a video in the scenario of inference
_STEPS = 100
_LATENCY = PlottedQuantity(
    "latency_s", f"Latency of {_STEPS} forwards (s)", measured("step_time_s", 1 / _STEPS), logarithmic=True
)
_THROUGHPUT = PlottedQuantity("throughput_samples_per_s", "Samples per second", measured("samples_per_s"))
#: the name of each dimension of the grid that a method may split
_SPLITS = {0: "by frames", 1: "by places"}
#: the relative difference below which two lines cannot be told apart
_ALIKE = 1e-3


def _video(row: Row) -> str:
    """The shape of a row's latent video as text: "16 frames of 1024 places"."""
    positions, frames = LENGTHS.at(row), option(row, "model_options", "temporal")
    if not frames:
        return f"{positions} latent positions"
    return f"{frames} frames of {positions // frames} places"


def _by_video(
    rows: Sequence[Row], comparison: DataFrame, quantity: PlottedQuantity, default_title: str
) -> PanelGrid:
    """A panel for each model, cluster and video, shorter videos first, with a line for each strategy and
    dimension that the strategy splits."""
    several = {name: shared(rows, name) is None for name in ("model", "cluster")}

    def heading(row: Row) -> str:
        texts = [model_name(model(row))] * several["model"] + [row["cell"]["cluster"]] * several["cluster"]
        return ", ".join([*texts, _video(row)])

    of_video = grouped(sorted(rows, key=lambda row: (model(row), LENGTHS.at(row))), heading)
    facets = {name: lines_of(some, GPUS, _split) for name, some in of_video.items()}
    remarks = list(_one_over_the_other(facets, quantity.value))
    return line_grid(rows, facets, [quantity], comparison, default_title, GPUS, remarks)


def _split(row: Row) -> str:
    dim = option(row, "strategy_options", "grid_dim")
    return "" if dim is None else _SPLITS.get(dim, f"by dim {dim}")


def _one_over_the_other(panels: Mapping[str, Sequence[Line]], value: Value) -> Iterator[str]:
    """A note for each two lines of one strategy that lie on each other, with the names of the panels."""
    where: dict[str, list[str]] = {}
    for name, lines in panels.items():
        for line, other in combinations(lines, 2):
            values, others = ({gpus(row): value(row) for row in of.rows} for of in (line, other))
            alike = line.look == other.look and values.keys() == others.keys()
            if alike and all(_alike(values[count], others[count]) for count in values):
                where.setdefault(f"{line.name} and {other.name}", []).append(name)
    for names, those in where.items():
        yield f"{names} differ by less than {_ALIKE:.1%} and are drawn over each other: {', '.join(those)}"


def _alike(value: float | None, other: float | None) -> bool:
    return value == other if value is None or other is None else abs(value - other) <= _ALIKE * other


def _scaling(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """Panels of strong and of weak scaling of each model, the model with the most numbers of GPUs first.

    Strong scaling is one length on several numbers of GPUs; in weak scaling lengths are proportional to the
    number of GPUs. A row may be in both. Lengths are positions of the latent video.
    """
    panels: dict[str, list[Row]] = {}
    for name, some in sorted(by_model(rows).items(), key=lambda of: -len(gpu_counts(of[1]))):
        for length, strong in sorted(grouped(some, LENGTHS.at).items()):
            panels[f"{name}, strong:\n{length_text(length)} positions"] = strong
        for load, weak in sorted(grouped(some, lambda row: LENGTHS.at(row) // gpus(row)).items()):
            # a row of strong scaling may have this load too, so a strategy needs several lengths
            growing = [
                row
                for mine in grouped(weak, strategy).values()
                if len(set(map(LENGTHS.at, mine))) > 1
                for row in mine
            ]
            if growing:
                panels[f"{name}, weak:\n{length_text(load)} positions a GPU"] = growing
    several = {name: some for name, some in panels.items() if len(gpu_counts(some)) > 1} or panels
    facets = {name: lines_of(some, GPUS) for name, some in several.items()}
    return line_grid(rows, facets, [TOKENS_PER_SECOND], comparison, "Throughput by number of GPUs", GPUS)


def _memory(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each model, video and number of GPUs; bars by method, without recomputation and with.

    The comparison is not used, because no number was read off the paper's figure.
    """
    facets = grouped(rows, lambda row: f"{model_name(model(row))}, {_video(row)}, {gpus(row)} GPUs")
    notes = lost_notes(
        (f"{name}, {strategy_name(strategy(row))}, {_setting(row)}", row)
        for name, some in facets.items()
        for row in some
    )
    panels = [
        [Panel(partial(_draw_memory, rows=some), name, y_label="Peak memory (GiB)", axis="linear")]
        for name, some in facets.items()
    ]
    return PanelGrid(title(rows, "Peak memory by method"), list(notes)).add(panels, abreast=1)


def _draw_memory(ax: Axes, rows: Sequence[Row]) -> Drawn:
    look = looks(map(strategy, rows))
    in_order = sorted(rows, key=lambda row: (_setting(row), list(look).index(strategy(row))))
    drawn = draw_rows(ax, grouped(in_order, _setting), measured("peak_memory_bytes", 2**30), "memory")
    return replace(drawn, methods=method_patches(look))


def _setting(row: Row) -> str:
    recomputes = option(row, "model_options", "checkpointing", False)
    return "activations recomputed" if recomputes else "activations kept"


def _communication(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel of sent elements for each model and video, smaller videos first."""
    in_order = sorted(rows, key=LENGTHS.at)
    return sent_elements(in_order, comparison, GPUS, lambda row: f"{model_name(model(row))}, {_video(row)}")


draw_dsp_throughput = Drawing(
    "dsp_throughput", partial(_by_video, quantity=_THROUGHPUT, default_title="Throughput by number of GPUs")
)
"""Throughput of training by number of GPUs and video: DSP (arXiv 2403.10266), version 1, Figure 3."""

draw_dsp_inference = Drawing(
    "dsp_inference", partial(_by_video, quantity=_LATENCY, default_title="Latency by number of GPUs")
)
"""Latency of generating a video by number of GPUs: DSP (arXiv 2403.10266), inference."""

draw_dsp_scaling = Drawing("dsp_scaling", _scaling)
"""Throughput to 128 GPUs, of one length and of one that grows with them: DSP (arXiv 2403.10266), scaling."""

draw_dsp_memory = Drawing("dsp_memory", _memory)
"""Peak memory of training by method, with and without recomputation: DSP (arXiv 2403.10266), memory."""

draw_dsp_communication = Drawing("dsp_communication", _communication)
"""What a GPU sends for a layer of ST-DiT by number of GPUs: DSP (arXiv 2403.10266), communication table."""
