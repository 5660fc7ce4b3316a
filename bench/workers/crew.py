"""The workers of one sweep, or of several in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from spbench.bench.cell import Cell
from spbench.bench.workers.worker import Outcome, Run, Worker


class Crew:
    """Workers that stay from sweep to sweep, so that each imports torch and fills its caches once.

    Leaving the context ends them all, whatever they do.
    """

    def __init__(self, run: Run):
        self.run = run
        self.workers: list[Worker] = []

    def idle(self, at_most: int) -> Worker | None:
        """A worker without a cell, started if there is none; None: so many are busy already."""
        if sum(worker.cell is not None for worker in self.workers) >= at_most:
            return None
        for worker in [worker for worker in self.workers if worker.cell is None]:
            if worker.alive:
                return worker
            self._discard(worker)
        self.workers.append(Worker(self.run))
        return self.workers[-1]

    @property
    def busy(self) -> bool:
        return any(worker.cell is not None for worker in self.workers)

    def ended(self) -> list[tuple[Cell, Outcome]]:
        """Wait until workers end a cell, die or run out of time; return their cells with the outcomes."""
        outcomes: list[tuple[Cell, Outcome]] = []
        while not outcomes:
            busy = [worker for worker in self.workers if worker.cell is not None]
            ready = wait([worker.connection for worker in busy], _seconds_until_first_deadline(busy))
            for worker in busy:
                cell, hung = worker.cell, False
                assert cell is not None
                outcome = worker.take() if worker.connection in ready else None
                if outcome is None and worker.out_of_time:
                    outcome, hung = worker.time_out(), True
                if outcome is not None:
                    outcomes.append((cell, outcome))
                    if hung or not worker.alive:
                        self._discard(worker)
        return outcomes

    def _discard(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.stop()
        worker.reap()

    def dismiss(self) -> None:
        """End all workers."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.reap()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.dismiss()


def _seconds_until_first_deadline(workers: Sequence[Worker]) -> float | None:
    deadlines = [worker.deadline for worker in workers if worker.deadline is not None]
    return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
