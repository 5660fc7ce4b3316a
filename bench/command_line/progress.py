"""Progress and messages on standard error for the person who waits.

On a terminal, progress is one line that is redrawn; elsewhere, a few lines; with --quiet, nothing. A warning
or another text that a person must know is a :func:`message`, which is always printed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

import click

from spbench.bench.command_line.output import for_stream
from spbench.bench.row import FAULTS, Row
from spbench.bench.units import GIB

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from spbench.bench.cell import Cell

#: the key in the context's ``meta`` of whether the command line has --quiet
_QUIET = "spbench.quiet"
#: the number of parts of the work after each of which a line is printed, if standard error is no terminal
_TENTHS = 10


def silence(ctx: click.Context, param: click.Parameter, quiet: bool) -> None:
    """The callback of --quiet: no progress of this command line is shown from now on."""
    ctx.meta[_QUIET] = quiet


def is_quiet() -> bool:
    """Whether the command line that is running has --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def message(text: str) -> None:
    """Print a text on standard error, at once."""
    print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)


def remark(text: str) -> None:
    """Print a text on the next work on standard error, unless the command line has --quiet."""
    if not is_quiet():
        message(text)


class Progress:
    """A context manager that shows the progress of a task on standard error: on a terminal a line with the
    share done, the time left and the present work, which is removed at the end; elsewhere a line a tenth.

    Args:
        total: the number of steps of the task; None: not known yet, or :meth:`at` tells the share instead.
    """

    def __init__(self, total: int | None = None):
        self.total, self.done = total, 0
        self._tenth, self._share = 0, 0.0
        self._bar: Bar | None = None
        if total != 0 and sys.stderr.isatty() and not is_quiet():
            from spbench.bench.command_line.drawn_tables import new_bar

            self._bar = new_bar()
        self._task = None if self._bar is None else self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def expect(self, total: int) -> None:
        """Set the number of steps, where it was not known at the beginning."""
        self.total = total

    def now(self, text: str) -> None:
        """Show ``text`` as the present work on a terminal."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=text)

    def keep(self, text: str) -> None:
        """Print a text above the line of progress on a terminal, where the text stays."""
        if self._bar:
            self._bar.console.print(for_stream(text, sys.stderr), soft_wrap=True, markup=False)

    def at(self, text: str, share: float) -> None:
        """Show ``text`` as the present work, and the share of the task that is done, from 0 to 1."""
        self.now(text)
        self._advance(f"[{share:.0%}] {text}", share)

    def step(self, text: str, *, is_fault: bool = False) -> None:
        """Count a step as done; ``text`` says how it ended, and stays on the screen if it is a fault."""
        assert self.total, "the number of steps is not known"
        self.done += 1
        self._advance(f"[{self.done}/{self.total}] {text}", self.done / self.total, is_fault=is_fault)

    def _advance(self, line: str, share: float, *, is_fault: bool = False) -> None:
        """Show a line and the share that is done; a smaller share than before counts as the earlier one."""
        share = self._share = max(share, self._share)
        tenth = int(share * _TENTHS + 1e-9)
        if self._bar and self._task is not None:
            self._bar.update(self._task, total=1.0, completed=share)
            if is_fault:
                self._bar.console.print(
                    for_stream(line, sys.stderr), style="red", soft_wrap=True, markup=False
                )
        elif is_fault or (tenth > self._tenth and not is_quiet()):
            message(line)
        self._tenth = max(self._tenth, tenth)


class SweepProgress(Progress):
    """Progress of a sweep, whose function :func:`sweep` calls :meth:`begin` and :meth:`end` for each cell."""

    def __init__(self, total: int):
        super().__init__(total)
        self.running: list[str] = []

    def begin(self, cell: Cell) -> None:
        """Show that a cell has begun."""
        self.running.append(cell.key)
        self._describe()

    def end(self, row: Row) -> None:
        """Show that a cell has ended, with its outcome."""
        self.running.remove(row.key)
        self.step(f"{_label(row.key)}: {_outcome(row)}", is_fault=row.status in FAULTS)
        self._describe()

    def _describe(self) -> None:
        self.now(f"{self.done} of {self.total} cells; now {', '.join(map(_label, self.running))}")


#: the progress of a sweep of a number of cells
watch = SweepProgress


def _label(key: str) -> str:
    """A cell's key without its digest."""
    return key.rsplit("/", 1)[0]


def _outcome(row: Row) -> str:
    measured = row.measurement
    parts: list[str] = [row.status]
    if measured.answer is not None:
        parts.append(f"{row.cell['search']['quantity']} {measured.answer}")
    if measured.peak_memory_bytes is not None:
        parts.append(f"peak {measured.peak_memory_bytes / GIB:.2f} GiB")
    if row.reason and row.status != "ok":
        parts.append(row.reason)
    return ", ".join(parts) + (f" ({row.elapsed_s:.1f} s)" if row.elapsed_s is not None else "")
