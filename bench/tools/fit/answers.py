"""Cells run by workers for `spbench fit`, and their outcomes kept on disk, so that the same question is
answered at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Self

from spbench.bench.cell import Cell
from spbench.bench.disk_cache import DiskCache, cache_folder
from spbench.bench.measure.engines.run_cell import Run
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.sweep.digest import digest
from spbench.bench.measure.sweep.executor import Executor
from spbench.bench.measure.sweep.sweep import unproven
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.measurement import Outcome

#: is told what is done, and the share of the task that is behind, of 1
Say = Callable[[str, float], None]
#: under this name a measurement's ``meters`` have what :func:`examine` took apart
FIT = "fit"
#: bytes of all kept outcomes; one has some 30 kB
_LIMIT_BYTES = 2**28
#: what another run would find too
_KEPT = ("ok", "oom", "unsupported", "mismatch")


def unheard(text: str, share: float) -> None:
    """What is said to nobody."""


def within(say: Say, low: float, high: float) -> Say:
    """What is said of a part of a task, which is from one share of it to another."""
    return lambda text, share: say(text, low + share * (high - low))


class Answers:
    """Runs cells on workers that stay until the context is left.

    Args:
        run: measures a cell; a function of a module, since other processes import it.
        jobs: workers; None: one a usable core.
        executor: where cells run, as many at a time as there is room for; None: here.
    """

    def __init__(self, run: Run, jobs: int | None = None, executor: Executor | None = None):
        self.run, self.executor = run, executor
        self.jobs = jobs or (usable_cores() if executor is None else executor.at_once)
        self.crew = Crew(run)
        folder = cache_folder()
        self._cache = None if folder is None else DiskCache(folder / "fits", _LIMIT_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.crew.dismiss()

    def __call__(
        self, cells: Sequence[Cell], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Cell, Outcome]]:
        """The cells with their outcomes, each as soon as it has one.

        Args:
            enough: asked before a cell begins; true: no more is begun.
        """
        waiting: list[Cell] = []
        refused = unproven(cells)
        for cell in cells:
            if (known := refused.get(cell.key) or self._read(cell)) is None:
                waiting.append(cell)
            else:
                yield cell, known
        if self.executor is not None and waiting:
            yield from self._elsewhere(waiting, self.executor)
            return
        waiting.reverse()
        while (waiting and not enough()) or self.crew.busy:
            while waiting and not enough() and (worker := self.crew.idle(self.jobs)) is not None:
                worker.give(waiting.pop())
            for cell, outcome in self.crew.ended():
                self._write(cell, outcome)
                yield cell, outcome

    def _elsewhere(self, cells: Sequence[Cell], executor: Executor) -> Iterator[tuple[Cell, Outcome]]:
        for cell, outcome in executor.outcomes(cells, self.run, lambda cell: None):
            self._write(cell, outcome)
            yield cell, outcome

    def _key(self, cell: Cell) -> str:
        question = json.dumps([self.run.__name__, digest(cell)], sort_keys=True)
        return hashlib.sha256(question.encode()).hexdigest()

    def _read(self, cell: Cell) -> Outcome | None:
        content = None if self._cache is None else self._cache.read(self._key(cell))
        try:
            return None if content is None else Outcome(**json.loads(content))
        except (ValueError, TypeError):  # damaged
            return None

    def _write(self, cell: Cell, outcome: Outcome) -> None:
        if self._cache is not None and outcome.status in _KEPT and outcome.final:
            self._cache.write(self._key(cell), json.dumps(asdict(outcome)).encode())
