"""Fields of a cell by the names that scenarios give them where they speak of published rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.config.choices import strategy_axes
from spbench.impls.axes import MESH_AXES, ranks_along

#: what a column may be matched to; and, with a dot and a name, an option of SECTIONS. ``parallel`` is the
#: ranks along the strategy's own axes, ``world`` all ranks, ``micro_batch`` the samples of one of a replica's
FIELDS = (
    *("model", "strategy", "batch", "micro_batch", "seq_len", "precision", "cluster", "engine"),
    *("parallel", "world"),
    *MESH_AXES,
)
SECTIONS = ("model_options", "strategy_options", "training")


def is_option(field: str) -> bool:
    """Whether a field is an option of one of SECTIONS, as model_options.layers is."""
    section, _, option = field.partition(".")
    return bool(option) and section in SECTIONS


def field_value(cell: Cell, field: str) -> Any:
    """A field of a cell as FIELDS and SECTIONS name it; None for an option that the cell does not set."""
    if field == "parallel":
        return ranks_along(strategy_axes(cell.strategy), cell.sizes.by_axis)
    if field == "world":
        return cell.sizes.world
    if field == "micro_batch":
        parts = cell.sizes.dp * cell.training.micro_batches
        return None if cell.batch is None else cell.batch / parts
    if field in MESH_AXES:
        return cell.sizes.by_axis[field]
    section, _, option = field.partition(".")
    found = getattr(cell, section)
    if not option:
        return found
    return found.get(option) if isinstance(found, Mapping) else getattr(found, option, None)
