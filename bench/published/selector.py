"""Selectors: one cell of a scenario, named by what is particular to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator

from spbench.bench.cell import Cell
from spbench.impls.axes import check_axis_names

_ABSENT = object()


class Selector(BaseModel):
    """Names one cell of a scenario by what is particular to it; what is left out may be anything.

    Of sizes, model_options, strategy_options and training, the settings given must be the cell's. ``mesh`` is
    the order of those of its axes that have more than one rank, whatever it says of others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    strategy: str | None = None
    world: PositiveInt | None = None
    sizes: dict[str, PositiveInt] = {}
    mesh: list[str] | None = None
    batch: PositiveInt | None = None
    seq_len: PositiveInt | None = None
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

    def matches(self, cell: Cell) -> bool:
        """Whether the cell is one of those named."""
        for name in ("model", "strategy", "batch", "seq_len", "precision"):
            if (wanted := getattr(self, name)) is not None and wanted != getattr(cell, name):
                return False
        has = cell.model_dump()
        nested = all(
            has[name].get(option, _ABSENT) == value
            for name in ("sizes", "model_options", "strategy_options", "training")
            for option, value in getattr(self, name).items()
        )
        return nested and self.world in (None, cell.sizes.world) and self._has_order(cell)

    def _has_order(self, cell: Cell) -> bool:
        split = [axis for axis, size in cell.mesh_sizes.items() if size > 1]
        return self.mesh is None or [axis for axis in self.mesh if axis in split] == split

    def select(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that it names."""
        return [cell for cell in cells if self.matches(cell)]

    def unclear(self, cells: Sequence[Cell]) -> Iterator[str]:
        """Why it does not name one cell on each cluster and engine, if it does not."""
        selected = self.select(cells)
        if not selected:
            yield f"no group declares a cell with {self}"
        elif len({(cell.cluster, cell.engine) for cell in selected}) < len(selected):
            yield (
                f"selects {len(selected)} cells, such as {selected[0].key} and {selected[1].key}; "
                "add a key that tells them apart"
            )

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.model_dump(exclude_defaults=True).items())
