"""Published numbers: their identity, and the settings that were chosen by looking at them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from spbench.bench.yaml_files import StrictModel

Scalar = str | int | float | bool


@dataclass(frozen=True)
class PublishedNumber:
    """One number that was published, or the position where a paper shows a run without one.

    Attributes:
        source: its identity, FILE:ROW:COLUMN, the same in every scenario that compares it.
        quantity: what it is a number of, in the words of its answer (a column of a table, "ratio", ...).
        value: None where no number was published.
        text: the columns of its row, as they stand in the file.
    """

    source: str
    quantity: str
    value: float | None
    text: Mapping[str, str] = field(default_factory=dict)

    def has(self, selector: Mapping[str, Scalar]) -> bool:
        """Whether the row has these values."""
        return all(
            column in self.text and stands_for(self.text[column], value) for column, value in selector.items()
        )


def stands_for(text: str, value: Any) -> bool:
    """Whether a published word is a value of ours: 4 is "4" and "4.0", True is "true", None is ""."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == ("" if value is None else str(value))


def finite(text: str) -> float:
    """The number that a text is.

    Raises:
        ValueError: it is none, or NaN or infinite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no finite number: {text}")
    return number


class InferredSetting(StrictModel):
    """A setting that a paper leaves out, and the published numbers that decided it: no predictions any more.

    Attributes:
        setting: what was chosen.
        answers: the names of the claims and tables that were looked at.
        quantities: of these, the quantities; empty: all.
        rows: of these, the rows, by column and value (any of them); empty: all.
        variants: the scenario's variants that have the setting; empty: all.
        reason: one line: why this value.
    """

    setting: str
    answers: list[str] = Field(min_length=1)
    quantities: list[str] = []
    rows: list[dict[str, Scalar]] = []
    variants: list[str] = []
    reason: str

    def covers(self, answer: str, number: PublishedNumber, variant: str) -> bool:
        """Whether this number of this answer was looked at to choose the setting that the variant has."""
        return (
            answer in self.answers
            and (not self.quantities or number.quantity in self.quantities)
            and (not self.rows or any(number.has(row) for row in self.rows))
            and (not self.variants or variant in self.variants)
        )
