"""How closely a cell is looked at: by traces of few layers and few micro-batches, or of all layers."""

from __future__ import annotations

from typing import Literal

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement

#: "small": the cell as it is, timed whatever it needs; "few_layers", "all_layers": see :mod:`.extrapolated`
Depth = Literal["small", "few_layers", "all_layers"]


class Look(Cell):
    """A cell, and how closely it is looked at."""

    depth: Depth = "small"

    @classmethod
    def at(cls, cell: Cell, depth: Depth) -> Look:  # type: ignore[override]
        """A look at a cell."""
        return cls.model_construct(**{**dict(cell), "depth": depth})

    @property
    def cell(self) -> Cell:
        """The cell alone."""
        return Cell.model_construct(**{name: getattr(self, name) for name in Cell.model_fields})


def look(cell: Cell) -> Measurement:
    """What a worker runs; torch is imported there. See :func:`spbench.bench.advise.extrapolated.look`."""
    from spbench.bench.advise.extrapolated import look as run

    assert isinstance(cell, Look)
    return run(cell.cell, cell.depth)
