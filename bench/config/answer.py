"""The protocol of answers: what a scenario sets beside published numbers, in a section of its file a kind.

The kinds are the modules of :mod:`bench.comparison.answers`. They are found by being there, so that neither
the schema of scenario files nor the comparison names any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from spbench.bench.cell import Cell, Measurement
from spbench.impls.discovery import named_classes

if TYPE_CHECKING:
    from spbench.bench.comparison.comparisons import Comparison, ScenarioResults

KINDS_PACKAGE = "spbench.bench.comparison.answers"

#: fields of a measurement that are one number
QUANTITIES = (
    *("answer", "peak_memory_bytes", "reserved_memory_bytes"),
    *("step_time_s", "tokens_per_s", "samples_per_s"),
)
assert {f.name for f in fields(Measurement)} >= set(QUANTITIES)

Scalar = str | int | float | bool
KeyPath = Sequence[str | int]
#: (key path, what is wrong there and how to mend it)
Mistake = tuple[KeyPath, str]


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


class Answer(BaseModel, ABC):
    """An entry of one section of a scenario file: published numbers, and what of ours is set beside them.

    Attributes:
        name: of the kind, and of its section of the file, a list of such entries.
        naming_field: the field that names an entry; no two entries of a scenario have the same name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    naming_field: ClassVar[str] = "claim"

    @property
    def entry_name(self) -> str:
        """The name of this entry, which nothing else that the scenario answers to has."""
        return str(getattr(self, self.naming_field))

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        """The published numbers that it compares; none, where a kind compares something else.

        Args:
            folder: the scenario file's, where published files of its own may be.

        Raises:
            UserError: they cannot be read.
        """
        return []

    @abstractmethod
    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        """The cells among ``declared`` that it speaks of."""

    @abstractmethod
    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        """What makes it impossible to compare, as (key path within the entry, message).

        Args:
            declared: the scenario's cells, of one variant.
            folder: the scenario file's.
        """

    @abstractmethod
    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        """Ours beside what was published, from results of one variant, cluster and engine."""

    @classmethod
    def compare_all(cls, entries: Sequence[Self], results: ScenarioResults) -> Iterator[Comparison]:
        """The comparisons of a scenario's entries of this kind in each variant, cluster and engine."""
        for part in results.split():
            for entry in entries:
                yield from entry.compare(part)


def answer_kinds() -> Mapping[str, type[Answer]]:
    """The kinds of answers by the sections of a scenario file: the modules of the package, then plug-ins."""
    return named_classes(KINDS_PACKAGE, Answer, "spbench.answers")
