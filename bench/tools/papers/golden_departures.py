"""Which golden values of Megatron-LM's tests may not be those of a case's arguments, as the values show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spbench.bench.cell import Cell
from spbench.bench.tools.papers.sources import published_file

GOLDEN_FILES = ("megatron_lm_goldens.csv", "megatron_lm_goldens_more.csv", "megatron_moe_goldens.csv")
#: quantities of memory that golden values have
MEMORY = ("peak_first", "peak_last", "allocated_last")
GPUS = ("a100", "h100", "gb200")
#: the end of a golden value's name: of the run that goes on from a checkpoint
RESUMED = "_2nd"


def machine_of(golden: str) -> tuple[str, bool]:
    """The kind of machine of a golden value, A100 where its name has none, and whether the run went on from
    a checkpoint."""
    return next((gpu for gpu in GPUS if gpu in golden), "a100"), golden.endswith(RESUMED)


def varies_by(cell: Cell) -> str:
    """What decides how many rows a rank's experts get, if the cell does not: "routing", what the router has
    learned, or "sinkhorn", which shares each rank's own tokens out evenly, but for ties. "": no experts are
    spread over ranks, a capacity is filled up, or tokens are forced to be even."""
    options = dict(cell.model_options)
    spread = cell.sizes.by_axis.get("ep", 1) > 1
    filled = options.get("capacity") is not None and bool(options.get("capacity_padded"))
    if not options.get("experts") or not spread or filled or "routing" in options:
        return ""
    return "sinkhorn" if options.get("router") == "sinkhorn" else "routing"


def departures(varying: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Why golden values may not be those of a case's arguments in this release, by case and golden value, as
    the values themselves show: "as CASE GOLDEN" where those of lts are all those of another case or of dev,
    "machine" where an A100's step takes as long as an H100's and leaves as much allocated, "release" where
    the first peak of lts is further than 5% from each of dev, "checkpoint" where a run that went on from one
    has its largest peak before its first step ends, and else what the case is ``varying`` by."""
    found: dict[tuple[str, str], str] = {}
    before: dict[tuple[str, ...], tuple[str, str]] = {}
    rows = [row for file in GOLDEN_FILES for row in published_file(file).rows]
    of_h100 = {row["case"]: row for row in rows if row["golden"] == "dev_dgx_h100"}
    of_dev: dict[str, list[float]] = {}
    for row in rows:
        if row["golden"].startswith("dev") and row["peak_first"] and not machine_of(row["golden"])[1]:
            of_dev.setdefault(row["case"], []).append(float(row["peak_first"]))
    for row in rows:
        place, first = (row["case"], row["golden"]), row["peak_first"]
        values = tuple(row[quantity] for quantity in MEMORY)
        other = before.setdefault(values, place) if all(values) else place
        another = other[0] != place[0] or other[1][:3] != place[1][:3]
        if place[1].startswith("lts") and another:
            found[place] = f"as {' '.join(other)}"
        elif machine_of(place[1])[0] == "a100" and _alike(row, of_h100.get(place[0])):
            found[place] = "machine"
        elif place[1].startswith("lts") and first and _far(float(first), of_dev.get(place[0], [])):
            found[place] = "release"
        elif place[1].endswith(RESUMED) and first == row["peak_last"]:
            found[place] = "checkpoint"
        elif kind := varying.get(place[0]):
            found[place] = kind
    return found


def _alike(row: Mapping[str, str], other: Mapping[str, str] | None) -> bool:
    """Whether a golden value has the step time of another within 2%, and its memory at the end within 1 MiB:
    of an A100 and an H100 workspaces alone differ by more, and steps of the same work by a third."""
    if other is None or not all(each["iter_s"] and each["allocated_last"] for each in (row, other)):
        return False
    last, time = (abs(float(row[name]) - float(other[name])) for name in ("allocated_last", "iter_s"))
    return last < 2**20 and time < 0.02 * float(other["iter_s"])


def _far(value: float, others: Sequence[float]) -> bool:
    """Whether a value is further than 5% from each of some others."""
    return bool(others) and all(abs(value / each - 1) > 0.05 for each in others)
