"""List the cells of one file of rows whose MFU, compute, bubble, step time or status differ in another.

    python scripts/moved_rows.py BEFORE/cells.jsonl AFTER/cells.jsonl [--least SHARE]

A line has the cell and each number that moved, before and after; for step times also the relative change.
Rows are matched by key. ``--least``: numbers that moved by a smaller share are left out (1e-6).
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spbench.bench.measure.sweep.results import read_rows

#: the compared numbers, by name: the keys that lead to the number in a measurement
NUMBERS = {
    "MFU": ("mfu",),
    "compute_s": ("breakdown", "compute_s"),
    "bubble_s": ("breakdown", "bubble_s"),
    "step_time_s": ("step_time_s",),
}


def number(row: dict[str, Any], places: tuple[str, ...]) -> float | None:
    """The number of a row's measurement under nested keys ``places``; None if there is none."""
    value: Any = row["measurement"]
    for place in places:
        value = value.get(place) if value else None
    return value


def moved(before: dict[str, Any], after: dict[str, Any], least: float) -> Iterator[tuple[str, str]]:
    """The differences between two rows of a cell, as (name, text with both values)."""
    if before["status"] != after["status"]:
        yield "status", f"{before['status']} -> {after['status']}"
    for name, places in NUMBERS.items():
        a, b = number(before, places), number(after, places)
        if a == b:
            continue
        if a is None or b is None:
            yield name, f"{a} -> {b}"
        elif abs(b - a) > least * max(abs(a), abs(b)):
            share = f" ({b / a - 1:+.2%})" if name == "step_time_s" and a else ""
            yield name, f"{a:.4g} -> {b:.4g}{share}"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--least", type=float, default=1e-6)
    asked = parser.parse_args()
    old, new = ({row["key"]: row for row in read_rows(path)[0]} for path in (asked.before, asked.after))
    counts: Counter[str] = Counter()
    for key in sorted(old.keys() & new.keys()):
        changes = dict(moved(old[key], new[key], asked.least))
        counts.update(changes.keys() or {"nothing"})
        if changes:
            print(f"{key}: " + ", ".join(f"{name} {change}" for name, change in changes.items()))
    alone = {"gone": len(old.keys() - new.keys()), "new": len(new.keys() - old.keys())}
    print("; ".join(f"{name}: {count}" for name, count in (*counts.items(), *alone.items())))


if __name__ == "__main__":
    main()
