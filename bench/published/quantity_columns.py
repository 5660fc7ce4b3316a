"""Columns of published numbers, and which of our numbers each is compared with: its field, rank and step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from spbench.bench.cell import Cell
from spbench.bench.errors import suggestion
from spbench.bench.published.answer import QUANTITIES

#: fields of the entries of :attr:`Measurement.by_class`
CLASS_QUANTITIES = ("peak_memory_bytes", "reserved_memory_bytes", "allocated_bytes")
#: of these, what CUDA's allocator counts from the start of the process on, whatever the step
PEAKS = CLASS_QUANTITIES[:2]


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published file.

    Attributes:
        line: number of the row in its file, the first below the header being 1.
        text: what stands in each column; "" for nothing.
    """

    line: int
    text: Mapping[str, str]

    def value(self, column: str) -> float | None:
        """The number in a column, or None where none was published; ValueError for anything else."""
        text = self.text[column].strip()
        return float(text) if text else None

    def by_rank(self, column: str) -> dict[int, float]:
        """The numbers in a column that holds a JSON object of a number for each rank; empty where nothing was
        published; ValueError for anything else."""
        text = self.text[column].strip()
        found = json.loads(text) if text else {}
        if not isinstance(found, dict) or not all(type(value) in (int, float) for value in found.values()):
            raise ValueError(f"no object of a number for each rank: {text}")
        return {int(rank): float(value) for rank, value in found.items()}


@dataclass(frozen=True)
class Place:
    """A published number of a row, in the unit that is compared, and the rank that it is of.

    Attributes:
        rank: None for a number of the whole run.
        value: None where nothing was published.
    """

    rank: int | Literal["last"] | None
    value: float | None


#: the place of a number of the whole run, whatever the number
WHOLE_RUN = Place(None, None)


class QuantityColumn(BaseModel):
    """A column of published numbers and what of ours stands beside it: ``field`` divided by ``unit``.

    Attributes:
        field: of the measurement; with ``rank`` or ``step``, of an entry of its ``by_class``.
        unit: of the compared numbers, in units of the field.
        published_unit: of the column, if it is another than ``unit``.
        rank: the rank whose number it is; "each": the column has a JSON object by rank, and each is compared.
        step: of the traced steps, counted from 1; with a rank, the last one unless given.
        named: the quantity's name in comparisons, ``as`` in the file; the column's unless given.
        note: beside every number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: str
    unit: PositiveFloat = 1.0
    published_unit: PositiveFloat | None = None
    rank: NonNegativeInt | Literal["last", "each"] | None = None
    step: PositiveInt | Literal["first", "last"] | None = None
    named: str = Field("", alias="as")
    note: str = ""

    @property
    def of_classes(self) -> bool:
        """Whether the number is of a rank, or of a step other than that of the whole measurement."""
        return self.rank is not None or self.step is not None

    def places(self, row: PublishedRow, column: str) -> list[Place]:
        """The published numbers in a row; ValueError for what is none."""
        scale = (self.published_unit or self.unit) / self.unit
        if self.rank == "each":
            return [Place(rank, value * scale) for rank, value in row.by_rank(column).items()]
        value = row.value(column)
        return [Place(self.rank, None if value is None else value * scale)]

    def words(self, place: Place) -> list[str]:
        """The rank and the step of a number as texts, such as "last rank", "first step"."""
        rank = [] if place.rank is None else [_nth(place.rank, "rank")]
        return rank + ([] if self.step is None else [_nth(self.step, "step")])

    def ours(self, measurement: Mapping[str, Any], cell: Cell, place: Place) -> float | None:
        """Our number, in the compared unit; None where the measurement has none."""
        if not self.of_classes:
            found = measurement.get(self.field)
        else:
            entries = measurement.get("by_class") or []
            if place.rank is not None:
                entries = _of_rank(entries, cell, place.rank)
            found = _largest_at(entries, self.step or "last", self.field)
        return None if found is None else found / self.unit

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """What is wrong with it, as (key, message)."""
        known = CLASS_QUANTITIES if self.of_classes else QUANTITIES
        if self.field not in known:
            yield "field", f"unknown quantity {self.field!r}{suggestion(self.field, known)}"


def _nth(which: int | str, what: str) -> str:
    """As "last rank" or "rank 3"."""
    return f"{what} {which}" if isinstance(which, int) else f"{which} {what}"


def _of_rank(
    entries: Sequence[Mapping[str, Any]], cell: Cell, rank: int | Literal["last"]
) -> list[Mapping[str, Any]]:
    """The entries of the class that a rank belongs to."""
    wanted = cell.sizes.world - 1 if rank == "last" else rank
    from spbench.bench.engines.plan import rank_classes  # which imports torch

    first = next((each.first for each in rank_classes(cell) if wanted in each.ranks), None)
    return [entry for entry in entries if entry["rank"] == first]


def _largest_at(
    entries: Sequence[Mapping[str, Any]], step: int | Literal["first", "last"], field: str
) -> float | None:
    """The largest value of a field over the classes, at a step (of a peak: up to that step); None where there
    is none."""
    steps = sorted({entry["step"] for entry in entries})
    if not steps:
        return None
    wanted = step if isinstance(step, int) else steps[0 if step == "first" else -1]
    if wanted not in steps:
        return None
    first = steps[0] if field in PEAKS else wanted
    return max(entry[field] for entry in entries if first <= entry["step"] <= wanted)
