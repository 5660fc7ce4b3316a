"""Columns of published numbers, and which of ours each is compared with: its field, rank, step and phase."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.tools.papers.answer import QUANTITIES, Mistake, unknown_quantity
from spbench.bench.yaml_files import StrictModel, finite

#: fields of the entries of :attr:`Measurement.by_class`
CLASS_QUANTITIES = ("peak_memory_bytes", "reserved_memory_bytes", "allocated_bytes")
#: of these, what CUDA's allocator counts from the start of the process on, whatever the step
PEAKS = CLASS_QUANTITIES[:2]
#: which of an entry's ``phase_ends`` answers to a field at the end of a phase
AT_PHASE_ENDS = {"allocated_bytes": "allocated", "reserved_memory_bytes": "reserved"}

RankName = int | Literal["last"]


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
        """The number in a column, or None where none was published; ValueError for anything else, as for what
        is less than nothing."""
        text = self.text[column].strip()
        return _amount(text) if text else None

    def by_rank(self, column: str) -> dict[int, float]:
        """The numbers in a column that holds a JSON object of a number for each rank; empty where nothing was
        published; ValueError for anything else."""
        text = self.text[column].strip()
        content = json.loads(text, parse_int=str, parse_float=str, parse_constant=str) if text else {}
        if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
            raise ValueError(f"no object of a number for each rank: {text}")
        return {int(rank): _amount(value) for rank, value in content.items()}


def _amount(text: str) -> float:
    number = finite(text)
    if number < 0:
        raise ValueError(f"{text} is less than nothing")
    return number


@dataclass(frozen=True)
class RankNumber:
    """A published number of a row, in the unit that is compared, and the rank that it is of.

    Attributes:
        rank: None for a number of the whole run.
        value: None where nothing was published.
    """

    rank: RankName | None
    value: float | None


#: a number of the whole run, whatever its value
WHOLE_RUN = RankNumber(None, None)


class QuantityColumn(StrictModel):
    """A column of published numbers and what of ours stands beside it: ``field`` divided by ``unit``.

    Attributes:
        field: of the measurement; with ``rank`` or ``step``, of an entry of its ``by_class``.
        unit: of the compared numbers, in units of the field.
        published_unit: of the column, if it is another than ``unit``.
        rank: the rank whose number it is; "each": the column has a JSON object by rank, and each is compared.
        step: of the traced steps, counted from 1; with a rank or a phase, the last one unless given.
        phase: the number is that where the last phase of this name ends in the step, such as "forward", not
            that of the whole step.
        named: the quantity's name in comparisons, ``as`` in the file; the column's unless given.
        note: beside every number.
    """

    field: str
    unit: PositiveFloat = 1.0
    published_unit: PositiveFloat | None = None
    rank: NonNegativeInt | Literal["last", "each"] | None = None
    step: PositiveInt | Literal["first", "last"] | None = None
    phase: str | None = None
    named: str = Field("", alias="as")
    note: str = ""

    @property
    def of_classes(self) -> bool:
        """Whether the number is of a rank, of a step other than that of the whole measurement, or of a moment
        of a step."""
        return self.rank is not None or self.step is not None or self.phase is not None

    def numbers(self, row: PublishedRow, column: str) -> list[RankNumber]:
        """The published numbers in a row; ValueError for what is none."""
        scale = (self.published_unit or self.unit) / self.unit
        if self.rank == "each":
            return [RankNumber(rank, value * scale) for rank, value in row.by_rank(column).items()]
        value = row.value(column)
        return [RankNumber(self.rank, None if value is None else value * scale)]

    def words(self, number: RankNumber) -> list[str]:
        """The rank and the step of a number as texts, such as "last rank", "step 2"."""
        named = ((number.rank, "rank"), (self.step, "step"), (self.phase and "end of", self.phase))
        texts = [(f"{what} {at}" if isinstance(at, int) else f"{at} {what}", at) for at, what in named]
        return [text for text, at in texts if at is not None]

    def ours(self, measurement: Mapping[str, Any], cell: Cell, number: RankNumber) -> float | None:
        """Our number, in the compared unit; None where the measurement has none."""
        value = (
            self._of_classes(measurement, cell, number) if self.of_classes else measurement.get(self.field)
        )
        return None if value is None else value / self.unit

    def measured(self, ours: float) -> float:
        """The measured number that is ``ours`` in the compared unit; bytes are whole."""
        value = ours * self.unit
        return round(value) if self.field.endswith("_bytes") else value

    def _of_classes(self, measurement: Mapping[str, Any], cell: Cell, number: RankNumber) -> Any:
        """The largest value of the field over the classes of ranks at the step (of a peak: up to that step),
        or of the class of one rank; None where there is none."""
        entries = [entry for entry in measurement.get("by_class") or [] if entry["step"]]  # 0 is set-up
        if number.rank is not None:
            rank = cell.sizes.world - 1 if number.rank == "last" else number.rank
            first = next((each.first for each in rank_classes(cell) if rank in each.ranks), None)
            entries = [entry for entry in entries if entry["rank"] == first]
        steps = sorted({entry["step"] for entry in entries})
        if not steps:
            return None
        wanted = self.step if isinstance(self.step, int) else steps[0 if self.step == "first" else -1]
        if wanted not in steps:
            return None
        if self.phase is not None:
            ends = [entry["phase_ends"].get(self.phase) for entry in entries if entry["step"] == wanted]
            return max((end[AT_PHASE_ENDS[self.field]] for end in ends if end), default=None)
        earliest = steps[0] if self.field in PEAKS else wanted
        return max(entry[self.field] for entry in entries if earliest <= entry["step"] <= wanted)

    def mistakes(self) -> Iterator[Mistake]:
        """What is wrong with it, as (key path, message)."""
        known = CLASS_QUANTITIES if self.of_classes else QUANTITIES
        yield from unknown_quantity("field", self.field, known if self.phase is None else (*AT_PHASE_ENDS,))
