"""The table of memory: what each class of ranks takes in set-up and each step, and where it runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.command_line.output import Table

_GIB = 2**30


def memory_table(measured: Mapping[str, Mapping[str, Any]]) -> Table | str:
    """A line for the set-up (step 0) and each traced step of each class of ranks that run the same program,
    of cells whose measurement has them; a sentence if none has.

    Args:
        measured: measurements as rows have them, by the key of their cell.
    """
    lines = [
        {"cell": key if len(measured) > 1 else None, **line}
        for key, measurement in measured.items()
        for line in _lines(measurement)
    ]
    if not lines:
        return "No cell has the memory of its rank classes: meters count it on virtual ranks and on CPUs."
    usable = {measurement.get("usable_memory_bytes") for measurement in measured.values()}
    only = next(iter(usable)) if len(usable) == 1 else None
    title = "Memory of each rank class at each step" + (f", of {_gib(only)} GiB" if only else "")
    important = ("rank", "stage", "step", "fits", "peak GiB", "reserved GiB", "in")
    return Table(title, lines, important, ("cell", "held at the peak (GiB)"))


def _lines(measurement: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    entries: Sequence[Mapping[str, Any]] = measurement.get("by_class") or ()
    staged = any(entry["stage"] for entry in entries)
    for entry in entries:
        held = sorted(entry["peak_held"].items(), key=lambda item: -item[1])
        yield {
            "rank": entry["rank"],
            "ranks alike": entry["ranks"],
            "stage": entry["stage"] if staged else None,
            "step": entry["step"],
            "fits": "yes" if entry["status"] == "ok" else "no",
            "peak GiB": _gib(entry["peak_memory_bytes"]),
            "in": entry["peak_phase"],
            "reserved GiB": _gib(entry["reserved_memory_bytes"]),
            "at the end GiB": _gib(entry["allocated_bytes"]),
            "on the host GiB": _gib(n) if (n := entry.get("host_memory_bytes")) is not None else None,
            "held at the peak (GiB)": ", ".join(
                f"{name.replace('_', ' ')} {_gib(nbytes)}" for name, nbytes in held
            ),
        }


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}" if nbytes >= _GIB / 10 else f"{nbytes / _GIB:.2g}"
