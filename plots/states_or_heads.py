"""What a layer of a recurrence sends, and how long it takes, over lengths."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame

from spbench.plots.axes import LENGTHS
from spbench.plots.communication import sent_bytes
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_of, measured
from spbench.plots.series import Row, by_model, gpus, grouped


def _of_layers(row: Row) -> float | None:
    """MiB that a rank sends forward and backward: what is sent of gradients of weights is not of the layer's
    positions."""
    sent = [sent_bytes(row, "communication", phase) for phase in ("forward", "backward")]
    known = [nbytes for nbytes in sent if nbytes is not None]
    return sum(known) / 2**20 if len(known) == len(sent) else None


_SENT = PlottedQuantity("sent_mib", "Sent per GPU\nand layer (MiB)", _of_layers, logarithmic=True)
_TIME = PlottedQuantity("step_ms", "Step of a layer (ms)", measured("step_time_s", 1e-3), logarithmic=True)


def _states_or_heads(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each model and number of GPUs, with a line for each strategy.

    Args:
        rows: of models of one layer.
    """
    facets = {
        f"{name}, {count} GPUs": lines_of(of_count, LENGTHS)
        for name, some in by_model(rows).items()
        for count, of_count in sorted(grouped(some, gpus).items())
    }
    return line_grid(rows, facets, (_SENT, _TIME), comparison, "What a layer of a recurrence sends")


draw_states_or_heads = Drawing("states_or_heads", _states_or_heads)
"""What a rank sends for a layer of a recurrence, and the layer's step, by sequence length of each method."""
