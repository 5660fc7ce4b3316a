"""A published number: its identity, and the row of the file that it stands in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Scalar = str | int | float | bool


@dataclass(frozen=True)
class PublishedNumber:
    """One number that was published, or the place where a paper shows a run without one.

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
