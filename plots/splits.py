"""Splits of GPUs over the axes of a mesh: their names, and what a GPU sends along each axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spbench.impls.axes import MESH_AXES, in_order
from spbench.plots.series import Row, settings, strategy
from spbench.plots.style import TIMES, backend_name, category_colors, short_name

#: of bytes that go over the ranks of several axes at once, as sums of gradients do
SEVERAL = "several axes at once"


def axis_colors() -> dict[str, str]:
    """The colour of each axis of a mesh, then of SEVERAL."""
    return category_colors([*MESH_AXES, SEVERAL])


def split_names(rows: Sequence[Row]) -> list[str]:
    """A name for each row, as "tp 4 x sp 16, Megatron-SP + RSA": the axes of several ranks from the outermost
    of the mesh to the innermost, and the strategy; with the number of micro-batches if there are several, and
    the settings that tell rows apart which would have the same name."""
    names = [
        ", ".join(filter(None, [_axes(row), short_name(strategy(row)), _micro_batches(row)])) for row in rows
    ]
    alike: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        alike.setdefault(name, []).append(at)
    for numbers in alike.values():
        for at, text in zip(numbers, _told_apart([settings(rows[at]) for at in numbers]), strict=True):
            names[at] = ", ".join(filter(None, [names[at], text]))
    return names


def _axes(row: Row) -> str:
    cell = row["cell"]
    sizes = in_order(cell["sizes"], cell.get("mesh") or MESH_AXES)
    return f" {TIMES} ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 GPU"


def _micro_batches(row: Row) -> str:
    count = row["cell"]["training"]["micro_batches"]
    return f"{count} micro-batches" if count > 1 else ""


def _told_apart(of_rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for of in of_rows for name in of)
    differing = [name for name in names if len({str(of.get(name)) for of in of_rows}) > 1]
    return [", ".join(filter(None, (_spoken(name, of.get(name)) for name in differing))) for of in of_rows]


def _spoken(name: str, value: Any) -> str:
    if name == "checkpointing":
        return "recomputed" if value else ""
    if name == "backend":
        return backend_name(value)
    return "" if value is None else f"{name} {value}"


def sent_by_axis(row: Row) -> dict[str, float]:
    """Bytes that a GPU sends in a step along each axis, in the order of MESH_AXES, then of SEVERAL; without
    those that are none."""
    sent: Counter[str] = Counter()
    for entry in row["measurement"].get("communication") or ():
        axis = entry["axis"]
        sent[axis if axis in MESH_AXES else SEVERAL] += entry["sent_bytes"]
    return {axis: sent[axis] for axis in [*MESH_AXES, SEVERAL] if sent[axis]}
