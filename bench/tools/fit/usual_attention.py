"""The attention kernel of a model of which nobody says one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.attention_kernels import usual_kernel
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.scenarios.setting_changes import changed
from spbench.impls.models.model import model_preset

#: the option that says the kernel, and its value that says none
ATTENTION, NONE_SAID = "model_options.attention", "flash"


def with_usual_attention(cell: Cell) -> tuple[Cell, str]:
    """The cell with its card's usual kernel, where neither its model nor its options say one, and a remark on
    that; the cell as it is, and "", where they do, or nothing is known of the card."""
    model, device = model_preset(*cell.model_arguments), load_cluster(cell.cluster).device
    asks = is_dataclass(model) and "attention" in {each.name for each in fields(model)}
    kernel = usual_kernel(device)
    if not asks or model.attention_kernel != NONE_SAID or kernel == NONE_SAID:
        return cell, ""
    said = (
        f"attention: not said, so taken: {kernel}, usual on {device.name}; --set {ATTENTION}=... changes it"
    )
    return changed(cell, {ATTENTION: kernel}), said
