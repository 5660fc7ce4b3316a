"""The table of memory by rank class and step: which fits, how much it takes, and what holds it."""

from __future__ import annotations

from typing import Any

from spbench.bench.command_line.output import Table, memory_table

GIB = 2**30


def entry(rank: int, stage: int, step: int, status: str, peak: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "ranks": 4,
        "stage": stage,
        "step": step,
        "status": status,
        "peak_memory_bytes": peak,
        "peak_phase": "backward",
        "peak_held": {"parameters": GIB // 100, "activations": peak - GIB // 100},
        "reserved_memory_bytes": peak + GIB,
        "allocated_bytes": GIB // 2,
    }


def test_which_class_runs_out_at_which_step() -> None:
    classes = [
        entry(0, 0, 1, "ok", 10 * GIB),
        entry(0, 0, 2, "oom", 17 * GIB),
        entry(4, 1, 1, "ok", 8 * GIB),
        entry(4, 1, 2, "ok", 9 * GIB),
    ]
    table = memory_table({"cell": {"usable_memory_bytes": 16 * GIB, "by_class": classes}})
    assert isinstance(table, Table)
    assert table.title == "Memory of each rank class at each step, of 16.00 GiB"
    columns = (
        "cell",
        "rank",
        "ranks alike",
        "stage",
        "step",
        "fits",
        "peak GiB",
        "reserved GiB",
        "at the end GiB",
    )
    assert [tuple(line[column] for column in columns) for line in table.lines] == [
        (None, 0, 4, 0, 1, "yes", "10.00", "11.00", "0.50"),
        (None, 0, 4, 0, 2, "no", "17.00", "18.00", "0.50"),
        (None, 4, 4, 1, 1, "yes", "8.00", "9.00", "0.50"),
        (None, 4, 4, 1, 2, "yes", "9.00", "10.00", "0.50"),
    ]
    assert table.lines[0]["held at the peak (GiB)"] == "activations 9.99, parameters 0.01"


def test_several_cells_have_names_and_cards_of_their_own() -> None:
    one = [entry(0, 0, 1, "ok", GIB)]
    table = memory_table(
        {
            "small": {"usable_memory_bytes": 16 * GIB, "by_class": one},
            "large": {"usable_memory_bytes": 80 * GIB, "by_class": one},
            "losses": {"by_class": []},
        }
    )
    assert isinstance(table, Table)
    assert table.title == "Memory of each rank class at each step"
    assert [(line["cell"], line["stage"]) for line in table.lines] == [("small", None), ("large", None)]
    assert memory_table({"losses": {}}) == (
        "No cell has the memory of its rank classes: meters count it on virtual ranks and on CPUs."
    )
