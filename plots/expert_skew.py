"""Memory and time of models with experts, by how unevenly tokens choose experts."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from pandas import DataFrame

from spbench.plots.axes import Along, set_ticks
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_of, measured
from spbench.plots.series import Row, gpus, gpus_of, grouped, model, option
from spbench.plots.style import model_name

_ZIPF, _HUNDREDTHS = "zipf:", 100


def _routing(row: Row) -> str:
    return str(option(row, "model_options", "routing", ""))


def _exponent(row: Row) -> int:
    """The skew S in hundredths; expert number n is chosen in proportion to n^-S (Zipf's law)."""
    return round(_HUNDREDTHS * float(_routing(row).split(":")[1]))


@dataclass(frozen=True)
class _LinearAlong(Along):
    """A linear x axis, which may begin at zero."""

    def draw_axis(self, ax: Axes, places: Sequence[int]) -> None:
        """Set limits, and a tick at each of the places, which are in ascending order."""
        margin = 0.05 * (places[-1] - places[0]) or 1.0
        ax.set_xlim(places[0] - margin, places[-1] + margin)
        set_ticks(ax.xaxis, places, [self.tick(place) for place in places])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.tick_params(length=2.5, width=0.7, bottom=True)


_SKEW = _LinearAlong(
    "Skew S of the router (zipf:S)", _exponent, lambda at: f"{at / _HUNDREDTHS:g}", "", oom_persists=False
)
_QUANTITIES = (
    PlottedQuantity("peak_memory_gib", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30)),
    PlottedQuantity("step_ms", "Step (ms)", measured("step_time_s", 1e-3)),
    PlottedQuantity(
        "expert_imbalance", "Tokens of the fullest\nrank, over mean", measured("expert_imbalance")
    ),
)


def expert_skew(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each model and cluster, with a line for each strategy and variant.

    Args:
        rows: result rows; rows whose routing is not by Zipf's law are left out.
    """
    rows = [row for row in rows if _routing(row).startswith(_ZIPF)]
    facets = {
        name: lines_of(some, _SKEW, lambda row: str(row["cell"].get("variant") or ""))
        for name, some in grouped(
            rows, lambda row: f"{model_name(model(row))}, {gpus_of(row['cell']['cluster'], gpus(row))}"
        ).items()
    }
    return line_grid(rows, facets, _QUANTITIES, comparison, "What a skewed router costs", _SKEW)


draw = Drawing("expert_skew", expert_skew, "cells whose routing is zipf:S")
"""Peak memory, step and the fullest rank's tokens by the skew of the router, a line for each variant."""
