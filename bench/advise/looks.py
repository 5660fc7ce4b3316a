"""How closely a cell is looked at: by traces of few layers and few micro-batches, or of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from spbench.bench.cell import Cell
from spbench.bench.fit.answers import Answers
from spbench.bench.measurement import Measurement, Outcome

#: "small": the cell as it is, timed whatever it needs; "few_layers", "all_layers": see :mod:`.extrapolated`
Depth = Literal["small", "few_layers", "all_layers"]


class Look(Cell):
    """A cell, and how closely it is looked at."""

    depth: Depth = "small"

    @classmethod
    def of(cls, cell: Cell, depth: Depth) -> Look:
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


def outcomes(answers: Answers, looks: Sequence[Look]) -> Iterator[tuple[Look, Outcome]]:
    """What looks found, each as soon as it is there: "ok", "oom" or "unsupported".

    Raises:
        RuntimeError: a look failed, took too long or contradicts the closed forms, so that the answer would
            be one without it.
    """
    by_key = {each.key: each for each in looks}
    for cell, outcome in answers([*by_key.values()]):
        if outcome.status not in ("ok", "oom", "unsupported"):
            raise RuntimeError(f"{cell.key}: {outcome.status}: {outcome.reason}\n{outcome.traceback}")
        yield by_key[cell.key], outcome
