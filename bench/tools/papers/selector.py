"""Selectors: cells of a scenario, named by what is particular to them; and the fields that they may name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import PositiveInt, field_validator

from spbench.bench.cell import Cell, Count, strategy_axes
from spbench.bench.yaml_files import StrictModel
from spbench.impls.axes import MESH_AXES, check_axis_names, ranks_along

#: fields of a cell, and with a dot and a name the options of SECTIONS. ``parallel`` is the ranks along the
#: strategy's own axes, ``world`` all ranks, ``micro_batch`` the samples of one micro-batch of a replica
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
    value = getattr(cell, section)
    if not option:
        return value
    return value.get(option) if isinstance(value, Mapping) else getattr(value, option, None)


class Selector(StrictModel):
    """Names one cell of a scenario by what is particular to it; what is left out may be anything.

    ``mesh`` is the order of those of its axes that have more than one rank, whatever it says of others.
    """

    model: str | None = None
    strategy: str | None = None
    world: PositiveInt | None = None
    sizes: dict[str, PositiveInt] = {}
    mesh: list[str] | None = None
    batch: Count | None = None
    seq_len: Count | None = None
    precision: str | None = None
    model_options: dict[str, Any] = {}
    strategy_options: dict[str, Any] = {}
    training: dict[str, Any] = {}

    @field_validator("sizes", "mesh")
    @classmethod
    def _check_axes(cls, axes: Any) -> Any:
        if axes is not None:
            check_axis_names(list(axes))
        return axes

    def fields(self) -> dict[str, Any]:
        """The values that it asks for, by FIELDS and options of SECTIONS; the mesh apart."""
        simple = ("model", "strategy", "world", "batch", "seq_len", "precision")
        wanted = {name: value for name in simple if (value := getattr(self, name)) is not None}
        options = {f"{s}.{name}": value for s in SECTIONS for name, value in getattr(self, s).items()}
        return wanted | self.sizes | options

    def select(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that it names."""
        wanted = self.fields()
        return [cell for cell in cells if has_fields(cell, wanted) and self._has_order(cell)]

    def _has_order(self, cell: Cell) -> bool:
        split = [axis for axis, size in cell.mesh_sizes.items() if size > 1]
        return self.mesh is None or [axis for axis in self.mesh if axis in split] == split

    def unclear(self, cells: Sequence[Cell]) -> Iterator[str]:
        """Why it does not name one cell on each cluster and engine, if it does not."""
        selected = self.select(cells)
        if not selected:
            yield f"no group declares a cell with {self}"
        elif not is_one(selected):
            yield (
                f"selects {len(selected)} cells, such as {selected[0].key} and {selected[1].key}; "
                "add a key that tells them apart"
            )

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.model_dump(exclude_defaults=True).items())


def has_fields(cell: Cell, wanted: Mapping[str, Any]) -> bool:
    """Whether the fields of a cell have these values."""
    return all(field_value(cell, field) == value for field, value in wanted.items())


def is_one(cells: Sequence[Cell]) -> bool:
    """Whether there is at most one cell on each cluster and engine."""
    return len({(cell.cluster, cell.engine) for cell in cells}) == len(cells)
