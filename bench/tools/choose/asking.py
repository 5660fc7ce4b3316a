"""Workers that run functions on many cells at once and keep the outcomes on disk, so that the same question
is answered at once later; and the progress of a search."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from spbench.bench.cell import Cell
from spbench.bench.command_line.progress import remark
from spbench.bench.files import DiskCache, cache_folder
from spbench.bench.measure import Crew, Executor, Run, digest, unproven, usable_cores
from spbench.bench.measured_code import digest_of_files
from spbench.bench.measurement import Outcome

#: a callback that takes the current work in words, and the share of a task that is done, from 0 to 1
Say = Callable[[str, float], None]
#: under this name a measurement's ``meters`` may have ``cpu_s``, the CPU seconds that measuring took
COST = "cost"
#: the most bytes of kept outcomes; one outcome has about 30 kB
_LIMIT_BYTES = 2**28
#: statuses that another run would have too, so that their outcomes are kept
_KEPT = ("ok", "oom", "unsupported", "mismatch")


@functools.cache
def _code() -> str:
    """The digest of the source files in this folder, which the digest of measured code leaves out."""
    room = Path(__file__).parent
    return digest_of_files(room, sorted(room.glob("*.py")))


def unheard(text: str, share: float) -> None:
    """A :data:`Say` that shows nothing."""


def within(say: Say, low: float, high: float) -> Say:
    """A :data:`Say` for a part of a task, which spans the shares ``low`` to ``high`` of the task."""
    return lambda text, share: say(text, low + share * (high - low))


class Behind:
    """The progress of a search: in each part of the search, the share of its looks that have ended.

    Args:
        say: takes the current work in words, and the share of the search that is done.
    """

    def __init__(self, say: Say):
        self.say, self.text = say, ""
        self._span, self._ended, self._left = (0.0, 0.0), 0, 0

    def begin(self, text: str, low: float, high: float) -> None:
        """Begin a part of the search, which spans the shares ``low`` to ``high`` of it."""
        self.text, self._span, self._ended = text, (low, high), 0
        self.say(text, low)

    def expect(self, text: str, left: int) -> None:
        """Set the current work in words, and how many more looks this part will probably take."""
        self.text, self._left = text, left
        self.ended(0, 0)

    def ended(self, n: int, of: int) -> None:
        """Note that ``n`` looks have ended, of the ``of`` that run together."""
        self._left, (low, high) = max(self._left, of), self._span
        self.say(self.text, low + (high - low) * (self._ended + n) / max(1, self._ended + self._left))
        if n == of:
            self._ended, self._left = self._ended + n, self._left - n


class Task(NamedTuple):
    """A cell, and the function that a worker runs on the cell: a function of a module, or a partial of one.
    Tasks of one call must have different objects as cells."""

    cell: Cell
    run: Run


def _name(run: Run) -> str:
    """The name of a function, with the arguments of a partial; a part of the key of kept outcomes."""
    if isinstance(run, functools.partial):
        return f"{run.func.__qualname__} {run.args} {run.keywords}"
    return run.__qualname__


class Asking(AbstractContextManager["Asking"]):
    """Workers that run tasks; the workers stay until the context is left.

    Args:
        jobs: how many workers; None: one for each usable core.
        executor: runs the tasks, as many at a time as it has room for; None: this machine does.

    Attributes:
        jobs: how many tasks can run at a time.
        cpu_s: CPU seconds that the outcomes took when they were measured, from their :data:`COST`.
    """

    def __init__(self, jobs: int | None = None, executor: Executor | None = None):
        self.executor, self.cpu_s = executor, 0.0
        self.jobs = jobs or (usable_cores() if executor is None else executor.at_once)
        self.crew = Crew()
        folder = cache_folder()
        self._cache = None if folder is None else DiskCache(folder / "asked", _LIMIT_BYTES)

    def __exit__(self, *error: object) -> None:
        self.crew.dismiss()

    def __call__(
        self, tasks: Sequence[Task], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Task, Outcome]]:
        """Yield each task with its outcome as soon as the outcome is there, kept outcomes first.

        Args:
            enough: called before a task begins; if it returns True, no further task begins.
        """
        waiting: list[Task] = []
        refused = unproven((task.cell for task in tasks), say=remark)
        for task in tasks:
            outcome = refused.get(task.cell.key) or self._read(task)
            if outcome is None:
                waiting.append(task)
            else:
                yield task, self._counted(outcome)
        task_of = {id(task.cell): task for task in waiting}
        here = ((task_of[id(c)], out) for c, out in self.crew.outcomes(waiting, self.jobs, enough=enough))
        for task, outcome in here if self.executor is None else self._there(waiting):
            if self._cache is not None and outcome.status in _KEPT and outcome.final:
                self._cache.write(self._key(task), json.dumps(asdict(outcome)).encode())
            yield task, self._counted(outcome)

    def _there(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        assert self.executor is not None
        for _, alike in groupby(tasks, lambda task: _name(task.run)):
            task_of = {task.cell.key: task for task in alike}
            run = next(iter(task_of.values())).run
            cells = [task.cell for task in task_of.values()]
            for cell, outcome in self.executor.outcomes(cells, run, lambda cell: None):
                yield task_of[cell.key], outcome

    def _counted(self, outcome: Outcome) -> Outcome:
        self.cpu_s += outcome.measurement.get("meters", {}).get(COST, {}).get("cpu_s", 0.0)
        return outcome

    def _key(self, task: Task) -> str:
        question = json.dumps([_code(), _name(task.run), digest(task.cell)])
        return hashlib.sha256(question.encode()).hexdigest()

    def _read(self, task: Task) -> Outcome | None:
        content = None if self._cache is None else self._cache.read(self._key(task))
        try:
            return None if content is None else Outcome(**json.loads(content))
        except (ValueError, TypeError):  # damaged
            return None
