"""Rows as tables: one line each, as people read them, and as a pandas frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spbench.bench.measure.trust.bands import priced_by_in_words, tied, with_band
from spbench.bench.row import Row
from spbench.impls.axes import MESH_AXES, spelled, union

if TYPE_CHECKING:
    from pandas import DataFrame

#: words of a measurement on its step time
_WORDS = ("bound", "calibration", "rates", "band")


def flat(row: Row) -> dict[str, Any]:
    """A row as one level of plain values: the cell, then what was measured, with the interval of a simulated
    step time (:func:`with_band`), units in the names; ``mesh`` is :attr:`Cell.mesh_text`."""
    cell, measured = row["cell"], with_band(row)["measurement"]
    sizes = cell.get("sizes", {})
    searched = (cell.get("search") or {}).get("quantity", "")
    losses, errors = measured.get("losses"), measured.get("errors") or {}
    unmetered = losses or errors  # of a training run, or of ranks in turn
    return {
        **{name: cell.get(name) for name in ("model", "strategy")},
        "world_size": math.prod(sizes.values()),
        "mesh": spelled({axis: sizes.get(axis, 1) for axis in union(cell.get("mesh") or MESH_AXES, sizes)}),
        **{
            name: cell.get(name) for name in ("batch", "seq_len", "precision", "cluster", "engine", "variant")
        },
        "status": row["status"],
        "searched": searched,
        **{name: value for name, value in measured.items() if isinstance(value, (int, float, type(None)))},
        **(measured.get("breakdown") or {}),
        **(measured.get("parts") or {}),
        **{name: measured.get(name) or None for name in _WORDS},
        "priced_by": priced_by_in_words([measured]) or None,
        **{f"last_{name}": loss for name, loss in _last(losses).items()},
        **{f"error_{name}": error for name, error in errors.items()},
        **_metered(measured.get("meters") or {}),
        "sent_bytes": _sent(None if unmetered else measured.get("communication")),
        "formula_sent_bytes": _sent(None if unmetered else measured.get("formula")),
        "reason": row.get("reason", ""),
        "elapsed_s": row.get("elapsed_s"),
        "key": row["key"],
    }


def _metered(meters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What further meters found that is one number or word, as METER.NAME."""
    return {
        f"{meter}.{name}": value
        for meter, values in meters.items()
        for name, value in values.items()
        if isinstance(value, (int, float, str))
    }


def _last(losses: list[dict[str, float]] | None) -> dict[str, float]:
    return losses[-1] if losses else {}


def _sent(entries: list[dict[str, Any]] | None) -> float | None:
    return sum(entry["sent_bytes"] for entry in entries) if entries is not None else None


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as :func:`flat`, and ``tie``: whether a simulated time is one with the fastest (:func:`tied`)."""
    return [{**flat(row), "tie": tie} for row, tie in zip(rows, tied(rows), strict=True)]


def as_frame(rows: Iterable[Row]) -> DataFrame:
    """Rows as a wide table, one of :func:`flat_rows` each."""
    from pandas import DataFrame

    return DataFrame(flat_rows([*rows]))
