"""Progress and messages on standard error for the person who waits.

Progress is one line that rewrites itself on a terminal, and rare lines elsewhere; --quiet has none. What a
person must know, as a warning, is a :func:`message`, which is always printed.
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

#: under this name the context of a command line has whether --quiet was given
_QUIET = "spbench.quiet"
#: a line is printed at each of so many parts of the work, if standard error is no terminal
_TENTHS = 10


def silence(ctx: click.Context, param: click.Parameter, quiet: bool) -> None:
    """The callback of --quiet: from now on no progress of this command line is shown."""
    ctx.meta[_QUIET] = quiet


def is_quiet() -> bool:
    """Whether the command line that is running has --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def message(text: str) -> None:
    """Print a line on standard error, at once."""
    print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)


def remark(text: str) -> None:
    """Print a line on what is about to be done on standard error, unless --quiet was given."""
    if not is_quiet():
        message(text)


class Progress:
    """How far a task is, on standard error: on a terminal one line with the share done, the time left and
    what is being done, which is taken away at the end; elsewhere a line at each tenth. A context manager.

    Args:
        total: steps of the task; None: its share is told with :meth:`at`, or not known.
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
        """Say how many steps there are, where that is known only now."""
        self.total = total

    def now(self, text: str) -> None:
        """Say what is being done."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=text)

    def keep(self, text: str) -> None:
        """Print lines that stay, above the progress, for a person at a terminal."""
        if self._bar:
            self._bar.console.print(for_stream(text, sys.stderr), soft_wrap=True, markup=False)

    def at(self, text: str, share: float) -> None:
        """Show what is being done, and the share of the task that is done, from 0 to 1."""
        self.now(text)
        self._advance(f"[{share:.0%}] {text}", share)

    def step(self, text: str, *, is_fault: bool = False) -> None:
        """A step is done; ``text`` says what came of it, which stays on the screen if it is a fault."""
        assert self.total, "the number of steps is not known"
        self.done += 1
        self._advance(f"[{self.done}/{self.total}] {text}", self.done / self.total, is_fault=is_fault)

    def _advance(self, line: str, share: float, *, is_fault: bool = False) -> None:
        """Show a line and a share; a share less than before, as an estimate may be, counts as before."""
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
    """Progress of a sweep. :meth:`begin` and :meth:`end` are the hooks of :func:`sweep`."""

    def __init__(self, total: int):
        super().__init__(total)
        self.running: list[str] = []

    def begin(self, cell: Cell) -> None:
        """A cell has begun."""
        self.running.append(cell.key)
        self._describe()

    def end(self, row: Row) -> None:
        """A cell has ended."""
        self.running.remove(row.key)
        self.step(f"{_label(row.key)}: {_outcome(row)}", is_fault=row.status in FAULTS)
        self._describe()

    def _describe(self) -> None:
        self.now(f"{self.done} of {self.total} cells; now {', '.join(map(_label, self.running))}")


def watch(cells: int) -> SweepProgress:
    """The progress of so many cells."""
    return SweepProgress(cells)


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
    seconds = f" ({row.elapsed_s:.1f} s)" if row.elapsed_s is not None else ""
    return ", ".join(parts) + seconds
