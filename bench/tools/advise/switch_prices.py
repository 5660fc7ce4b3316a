"""What a single setting of a layout costs: by a trace of the layout with that one changed, whole as
`spbench run` has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.clusters.kinds_of_work import cannot_run
from spbench.bench.tools.advise.ranking import Seen
from spbench.impls.models.model import model_preset


@dataclass(frozen=True)
class Price:
    """What a setting of a layout costs.

    Attributes:
        settings: as ``--set`` takes them.
        used: whether the layout has it.
        layout, changed: the layout, and the same without the setting that it has, or with another one; both
            were traced whole.
    """

    settings: str
    used: bool
    layout: Seen
    changed: Seen

    @property
    def _both(self) -> tuple[Seen, Seen]:
        return (self.layout, self.changed) if self.used else (self.changed, self.layout)

    @property
    def ratio(self) -> float:
        """The time of a step with the setting over that without it."""
        with_it, without = self._both
        return with_it.step_s / without.step_s

    @property
    def saved_bytes(self) -> int:
        """What it takes off the peak."""
        with_it, without = self._both
        return without.peak - with_it.peak

    def content(self) -> dict[str, Any]:
        """The price for programs, with the cell that `spbench run` has the same of."""
        numbers = {name: getattr(self, name) for name in ("settings", "used", "ratio", "saved_bytes")}
        return {**numbers, "changed_fits": self.changed.fits, "changed_cell": self.changed.cell.key}


def other_kernels(cell: Cell) -> list[str]:
    """The attention kernels that the card has rates of, the cell's own among them; none where its model has
    no such kernel, or the card rates of one."""
    model, device = model_preset(*cell.model_arguments), load_cluster(cell.cluster).device
    rates_of = device.attention
    if rates_of is None or model.attention_kernel not in rates_of.kernels or not hasattr(model, "attention"):
        return []
    kernels = [
        str(name) for name, rates in rates_of.kernels.items() if rates and not cannot_run(device, name)
    ]
    return kernels if len(kernels) > 1 else []
