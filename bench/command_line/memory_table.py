"""The table of memory: what each class of ranks takes in set-up and each step, and where it runs out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.command_line.output import Column, Table
from spbench.bench.units import gib


def _held(entry: Mapping[str, Any]) -> str:
    held = sorted(entry["peak_held"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {gib(nbytes)}" for name, nbytes in held)


#: of the entries of :attr:`Measurement.by_class`, with the ``cell`` where there are several
_COLUMNS = (
    Column("cell", "cell"),
    Column("rank", "rank"),
    Column("ranks alike", "ranks"),
    Column("stage", "stage"),
    Column("step", "step"),
    Column("fits", "status", lambda status: "yes" if status == "ok" else "no"),
    Column("peak GiB", "peak_memory_bytes", gib),
    Column("in", "peak_phase"),
    Column("reserved GiB", "reserved_memory_bytes", gib),
    Column("at the end GiB", "allocated_bytes", gib),
    Column("on the host GiB", "host_memory_bytes", gib),
    Column("held at the peak (GiB)", "peak_held", of=_held),
)
_IMPORTANT = ("rank", "stage", "step", "fits", "peak GiB", "reserved GiB", "in")


def memory_table(measured: Mapping[str, Mapping[str, Any]]) -> Table | str:
    """A line for the set-up (step 0) and each traced step of each class of ranks that run the same program,
    of cells whose measurement has them; a sentence if none has.

    Args:
        measured: measurements as rows have them, by the key of their cell.
    """
    entries = []
    for key, measurement in measured.items():
        classes = measurement.get("by_class") or ()
        alike: dict[str, Any] = {} if any(entry["stage"] for entry in classes) else {"stage": None}
        entries += [{"cell": key if len(measured) > 1 else None, **entry, **alike} for entry in classes]
    if not entries:
        return "No cell has the memory of its rank classes: meters count it on virtual ranks and on CPUs."
    usable = {measurement.get("usable_memory_bytes") for measurement in measured.values()}
    only = next(iter(usable)) if len(usable) == 1 else None
    title = "Memory of each rank class at each step" + (f", of {gib(only)} GiB" if only else "")
    return Table.of(title, _COLUMNS, entries, important=_IMPORTANT, below=("cell", "held at the peak (GiB)"))
