"""Answers: published numbers that a scenario sets beside its own, in a section of its file for each kind.

The kinds are the modules of :mod:`tools.papers.answers`, found by being there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, suggestion
from spbench.bench.measurement import Measurement
from spbench.bench.published_number import InferredSetting, PublishedNumber
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.published_results import ScenarioResults
from spbench.bench.yaml_files import StrictModel
from spbench.impls.discovery import named_classes

KINDS_PACKAGE = "spbench.bench.tools.papers.answers"

#: fields of a measurement that are one number
QUANTITIES = (
    *("answer", "peak_memory_bytes", "reserved_memory_bytes"),
    *("step_time_s", "tokens_per_s", "samples_per_s"),
)
assert Measurement.model_fields.keys() >= set(QUANTITIES)

KeyPath = Sequence[str | int]
#: (key path, what is wrong there and how to mend it)
Mistake = tuple[KeyPath, str]


class Answer(StrictModel, ABC):
    """An entry of one section of a scenario file.

    Attributes:
        name: of the kind, and of its section of the file, a list of such entries.
        naming_field: the field that names an entry; no two entries of a scenario have the same name.
    """

    name: ClassVar[str]
    naming_field: ClassVar[str] = "claim"

    @property
    def entry_name(self) -> str:
        """The name of this entry."""
        return str(getattr(self, self.naming_field))

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        """The published numbers that it compares; none, where a kind compares something else. ``folder`` is
        the scenario file's, where published files may be. UserError if they cannot be read."""
        return []

    def unreadable(self, folder: Path) -> Iterator[Mistake]:
        """The mistake of numbers that cannot be read, if they cannot."""
        try:
            self.numbers(folder)
        except UserError as error:
            yield ["published"], str(error)

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
    """The kinds of answers by the sections of a scenario file: those in the modules of the package."""
    return named_classes(KINDS_PACKAGE, Answer)


def unknown_quantity(key: str, name: str, known: Sequence[str] = QUANTITIES) -> Iterator[Mistake]:
    """The mistake of a field of a measurement that is not one of ``known``, if it is not."""
    if name not in known:
        yield [key], f"unknown quantity {name!r}{suggestion(name, known)}"


def wrong_inference(
    inference: InferredSetting, answers: Sequence[Answer], variants: Sequence[str], folder: Path
) -> Iterator[Mistake]:
    """What in a scenario's inference names nothing that the scenario has, as (key path, message).

    Args:
        answers: all of the scenario's, checked.
        folder: the scenario file's.
    """
    for index, variant in enumerate(inference.variants):
        if variant not in variants:
            yield ["variants", index], f"unknown variant {variant!r}{suggestion(variant, variants)}"
    known = {answer.entry_name: answer for answer in answers}
    for index, name in enumerate(inference.answers):
        if name not in known:
            yield ["answers", index], f"no answer is called {name!r}{suggestion(name, known)}"
            return
        numbers = known[name].numbers(folder)
        quantities = dict.fromkeys(number.quantity for number in numbers)
        for at, quantity in enumerate(inference.quantities):
            if quantity not in quantities:
                yield ["quantities", at], f"{name} has no {quantity!r}{suggestion(quantity, quantities)}"
        for at, row in enumerate(inference.rows):
            if not any(number.has(row) for number in numbers):
                yield ["rows", at], f"no row of {name} is {row}"
