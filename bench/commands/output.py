"""What the commands print: tables for people on standard output, progress on standard error.

On a terminal tables are drawn; elsewhere they are Markdown, which reads as plain text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spbench.bench.cell import Cell
from spbench.bench.comparison.claims import Comparison
from spbench.bench.sweep.results import FAULTS, Row, flat

GIB, MIB = 2**30, 2**20

#: shown once above the table where all rows agree
_SHARED = ("batch", "seq_len", "precision", "cluster", "engine", "variant")


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of one set of columns; numbers are aligned, None is blank, empty columns are left out."""
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 10_000, highlight=False)
    columns = [name for name in (rows[0] if rows else {}) if any(row[name] not in (None, "") for row in rows)]
    table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN, show_edge=not terminal)
    for name in columns:
        number = all(isinstance(row[name], (int, float, type(None))) or _numeric(row[name]) for row in rows)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if row[name] is None else escape(str(row[name])) for name in columns))
    with console.capture() as drawn:
        console.print(escape(title), style="bold", soft_wrap=True)
        console.print(table)
    print("\n".join(line for line in drawn.get().splitlines() if line.strip()))


def _numeric(text: Any) -> bool:
    return isinstance(text, str) and (not text or text.strip("+-%x,.0123456789") == "")


def result_rows(rows: Sequence[Row]) -> tuple[str, list[dict[str, Any]]]:
    """The lines of the result table, and what all of them have in common."""
    flats = [flat(row) for row in rows]
    shared = {name: flats[0][name] for name in _SHARED if len({entry[name] for entry in flats}) == 1}
    options = _options([Cell.model_validate(row["cell"]) for row in rows])
    lines = []
    for entry, option in zip(flats, options, strict=True):
        line: dict[str, Any] = {name: entry[name] for name in ("model", "strategy")}
        line |= {"GPUs": entry["world_size"], "options": option}
        line |= {name: entry[name] for name in _SHARED if name not in shared}
        for quantity in ("seq_len", "batch"):
            line[f"max {quantity}"] = entry.get("answer") if entry["searched"] == quantity else None
        line |= {
            "peak GiB": _scaled(entry.get("peak_memory_bytes"), GIB),
            "reserved GiB": _scaled(entry.get("reserved_memory_bytes"), GIB),
            "sent MiB/GPU": _scaled(entry["sent_bytes"], MIB),
            "by formula": _scaled(entry["formula_sent_bytes"], MIB),
            "step s": entry.get("step_time_s") and f"{entry['step_time_s']:.4g}",
            "tokens/s": entry.get("tokens_per_s") and f"{entry['tokens_per_s']:.0f}",
            "steps": entry.get("last_step"),
            "last MLM loss": _loss(entry.get("last_mlm")),
            "last order loss": _loss(entry.get("last_order")),
            "status": entry["status"],
            "reason": entry["reason"] if entry["status"] != "ok" else None,
        }
        lines.append(line)
    return ", ".join(f"{name} {value}" for name, value in shared.items() if value not in (None, "")), lines


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.6f}"


def _scaled(nbytes: float | None, unit: int) -> str | None:
    if nbytes is None:
        return None
    return f"{nbytes / unit:.2f}" if nbytes >= unit / 10 or nbytes == 0 else f"{nbytes / unit:.2g}"


def _options(cells: Sequence[Cell]) -> list[str]:
    """Of each cell, the options and training settings that tell it from another that is the same but for
    them; nothing, where there is no such pair of cells."""
    shown = [(c.model, c.strategy, c.sizes, *(getattr(c, name) for name in _SHARED)) for c in cells]
    if len(set(shown)) == len(cells):
        return [""] * len(cells)
    settings = [{**c.model_options, **c.strategy_options, **c.training.model_dump()} for c in cells]
    names = dict.fromkeys(name for has in settings for name in has)
    differ = [name for name in names if len({str(has.get(name)) for has in settings}) > 1]
    return [
        " ".join(f"{name}={has[name]}" for name in differ if has.get(name) is not None) for has in settings
    ]


def comparison_rows(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The lines of the comparison table."""
    return [
        {
            "claim": entry.claim,
            "variant": entry.variant,
            "published": number_or_status(entry.published, entry.status_published),
            "ours": number_or_status(entry.reproduced, entry.status_reproduced),
            "relative error": None if entry.relative_error is None else f"{entry.relative_error:+.1%}",
            "role": entry.role,
            "note": entry.note,
        }
        for entry in comparisons
    ]


def number_or_status(number: float | None, status: str) -> str | None:
    """A number for people, or why there is none; both, where a run that failed has a number."""
    if number is None:
        return status or None
    text = f"{number:.6g}"
    return text if status in ("", "ok") else f"{status} ({text})"


def message(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)


class SweepProgress:
    """Progress of a sweep on standard error: a bar on a terminal, a line a cell elsewhere."""

    def __init__(self, total: int):
        self.total, self.done = total, 0
        self.running: dict[str, float] = {}
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True, highlight=False))
            self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> SweepProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def begin(self, cell: Cell) -> None:
        """A cell has begun."""
        self.running[cell.key] = time.monotonic()
        self._describe()

    def end(self, row: Row) -> None:
        """A cell has ended."""
        self.done += 1
        self.running.pop(row["key"], None)
        line = f"[{self.done}/{self.total}] {_label(row['key'])}: {_outcome(row)}"
        if self.bar:
            style = "red" if row["status"] in FAULTS else None
            self.bar.console.print(escape(line), style=style, soft_wrap=True)
            self.bar.advance(self.task)
        else:
            message(line)
        self._describe()

    def _describe(self) -> None:
        if self.bar:
            self.bar.update(self.task, description=escape(", ".join(map(_label, self.running))))


def _label(key: str) -> str:
    return key.rsplit("/", 1)[0]


def _outcome(row: Row) -> str:
    measured = row["measurement"]
    searched = (row["cell"].get("search") or {}).get("quantity")
    parts = [row["status"]]
    if measured.get("answer") is not None:
        parts.append(f"{searched} {measured['answer']}")
    if measured.get("peak_memory_bytes") is not None:
        parts.append(f"peak {measured['peak_memory_bytes'] / GIB:.2f} GiB")
    if row["reason"] and row["status"] != "ok":
        parts.append(row["reason"])
    seconds = f" ({row['elapsed_s']:.1f} s)" if row["elapsed_s"] is not None else ""
    return ", ".join(parts) + seconds
