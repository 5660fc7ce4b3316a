"""Progress and messages: lines on standard error for the person who waits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from spbench.bench.cell import Cell
    from spbench.bench.sweep.results import Row


def message(text: str) -> None:
    """Print a line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


class SweepProgress:
    """Progress of a sweep on standard error: a bar on a terminal, a line a cell elsewhere.

    A context manager, which shows the bar and takes it away. :meth:`begin` and :meth:`end` are the hooks of
    :func:`sweep`.
    """

    def __init__(self, total: int):
        self.total, self.done = total, 0
        self.running: list[str] = []
        self.bar = _bar() if sys.stderr.isatty() else None
        if self.bar:
            self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> SweepProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def begin(self, cell: Cell) -> None:
        """A cell has begun."""
        self.running.append(cell.key)
        self._describe()

    def end(self, row: Row) -> None:
        """A cell has ended."""
        from spbench.bench.sweep.results import FAULTS

        self.done += 1
        self.running.remove(row["key"])
        line = f"[{self.done}/{self.total}] {_label(row['key'])}: {_outcome(row)}"
        if self.bar:
            style = "red" if row["status"] in FAULTS else None
            self.bar.console.print(line, style=style, soft_wrap=True, markup=False)
            self.bar.advance(self.task)
        else:
            message(line)
        self._describe()

    def _describe(self) -> None:
        if self.bar:
            self.bar.update(self.task, description=", ".join(map(_label, self.running)))


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True, highlight=False),
    )


def _label(key: str) -> str:
    """A cell's key without its digest."""
    return key.rsplit("/", 1)[0]


def _outcome(row: Row) -> str:
    measured = row["measurement"]
    searched = (row["cell"].get("search") or {}).get("quantity")
    parts = [row["status"]]
    if measured.get("answer") is not None:
        parts.append(f"{searched} {measured['answer']}")
    if measured.get("peak_memory_bytes") is not None:
        parts.append(f"peak {measured['peak_memory_bytes'] / 2**30:.2f} GiB")
    if row["reason"] and row["status"] != "ok":
        parts.append(row["reason"])
    seconds = f" ({row['elapsed_s']:.1f} s)" if row["elapsed_s"] is not None else ""
    return ", ".join(parts) + seconds
