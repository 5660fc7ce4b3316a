"""The bar of progress on a terminal, drawn by rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text


class Share(ProgressColumn):
    """The share that is done and the time that is left if the rest goes alike; the time that was taken
    until something is known."""

    def render(self, task: Task) -> Text:
        taken = task.elapsed or 0.0
        if not task.total or not task.completed:
            return Text(_spelled(taken))
        return Text(f"{task.completed:.0%}, {_spelled(taken * (1 / task.completed - 1))} left")


def new_bar() -> Progress:
    """A bar on standard error: the share, the time left, and what is being done."""
    one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        BarColumn(bar_width=16),
        Share(),
        TextColumn("{task.description}", markup=False, table_column=one_line),
        console=Console(stderr=True, highlight=False),
        transient=True,
        expand=True,
        redirect_stdout=False,
    )


def _spelled(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
