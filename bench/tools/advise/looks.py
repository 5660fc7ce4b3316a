"""How closely a cell is looked at: by traces of few layers and few micro-batches, or of all layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from spbench.bench.cell import Cell
from spbench.bench.measure.sweep.executor import Executor
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.fit.answers import Answers

#: "small": the cell as it is, timed whatever it needs; "few_layers", "all_layers": see :mod:`.extrapolated`
Depth = Literal["small", "few_layers", "all_layers"]

#: under this name a measurement's ``meters`` have what the look itself took
LOOK = "look"
#: under this name they have ``tensors_bytes``, the least that the allocator must reserve for the fullest
#: ranks, and whether that is ``exact``, or follows from traces of few layers
NEEDED = "needed"


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
    """What a worker runs; torch is imported there. See :func:`tools.advise.extrapolated.look`. The
    measurement has the seconds of a core that it took, which do not depend on what else a machine does."""
    from spbench.bench.tools.advise.extrapolated import look as run

    assert isinstance(cell, Look)
    begun = time.process_time()
    found = run(cell.cell, cell.depth)
    found.meters[LOOK] = {"cpu_s": time.process_time() - begun}
    return found


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


class Looks(Answers):
    """Takes looks by workers.

    Attributes:
        cpu_s: seconds of a core that the looks took, when they were taken; some may be kept from earlier.
    """

    def __init__(self, jobs: int | None = None, executor: Executor | None = None):
        super().__init__(look, jobs, executor)
        self.cpu_s = 0.0

    def __call__(
        self, cells: Sequence[Cell], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Cell, Outcome]]:
        for cell, outcome in super().__call__(cells, enough):
            self.cpu_s += outcome.measurement.get("meters", {}).get(LOOK, {}).get("cpu_s", 0.0)
            yield cell, outcome
