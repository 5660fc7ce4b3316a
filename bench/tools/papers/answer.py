"""Answers: entries of a scenario's file, a section for each kind, that compare published numbers with ours.

The kinds are the modules of :mod:`tools.papers.answers`, which are detected. :func:`load_scenario` reads a
scenario with its answers and raises errors for mistakes; :func:`compare` compares the numbers with ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import create_model

from spbench.bench.cell import Cell
from spbench.bench.command_line.scenario_run import RanScenario
from spbench.bench.errors import UserError
from spbench.bench.measure import Document, Problem, Scenario, load_cluster
from spbench.bench.measure import load_scenario as load_cells
from spbench.bench.row import Row
from spbench.bench.tools.papers.comparison import Comparison, Role
from spbench.bench.tools.papers.comparison import write as write_comparisons
from spbench.bench.tools.papers.selector import QUANTITIES, Mistake, Selector, unknown
from spbench.bench.yaml_files import InferredSetting, PublishedNumber, StrictModel, validate
from spbench.impls import named_classes
from spbench.plots.series import grouped

KINDS_PACKAGE = "spbench.bench.tools.papers.answers"

#: quantities that a cluster's scalars and rates change
TIMED = QUANTITIES[3:]
#: limits of a cluster that change only which sizes fit, and the field with the largest size that fits
CAPACITIES = ("device.memory_total_bytes", "device.memory_context_bytes", "device.memory_peer_bytes")
CAPACITY_FIELD = "answer"

AnswerT = TypeVar("AnswerT", bound="Answer")


@dataclass(frozen=True)
class OurNumber:
    """A field of the measurement of one cell.

    Attributes:
        cell: the cell; None if a selector names no cell, or several.
        value: the field's value; None if there is none, for the reason in ``missing``, else "".
    """

    cell: Cell | None
    value: Any
    missing: str = ""


@dataclass(frozen=True)
class ScenarioResults:
    """The results with which the answers of a scenario are compared.

    Attributes:
        cells: the declared cells.
        rows: the rows of results by cell key, for the cells that have any.
        folder: the folder of the scenario's file, which may have published files of its own.
    """

    cells: Sequence[Cell]
    rows: Mapping[str, Row]
    folder: Path
    inferences: Sequence[InferredSetting] = ()

    @property
    def variant(self) -> str:
        """The variant of the first cell; all cells of a part of :meth:`split` have the same variant."""
        return self.cells[0].variant

    def split(self) -> list[Self]:
        """These results in parts, one for each variant, cluster and engine, in the order of the cells."""
        parts = grouped(self.cells, lambda cell: (cell.variant, cell.cluster, cell.engine))
        return [replace(self, cells=cells) for cells in parts.values()]

    def measured(self, selector: Selector, field: str) -> OurNumber:
        """A field of the measurement of the one cell that a selector names."""
        selected = selector.select(self.cells)
        if len(selected) != 1:
            return OurNumber(None, None, f"is {len(selected) or 'no'} cells ({selector})")
        return self.measured_at(selected[0], field)

    def measured_at(self, cell: Cell, field: str) -> OurNumber:
        """A field of a cell's measurement."""
        if cell.key not in self.rows:
            return OurNumber(cell, None, "was not run")
        row = self.rows[cell.key]
        value = row["measurement"].get(field)
        if value in (None, []) or row["status"] not in ("ok", "oom"):
            reason = f": {row['reason']}" if row["reason"] else ""
            return OurNumber(cell, None, f"has no {field}, {row['status']}{reason}")
        return OurNumber(cell, value)

    def role(self, answer: str, number: PublishedNumber, field: str, cells: Sequence[Cell]) -> Role:
        """Returns "calibrated" if a scalar or rate of the cells' cluster was fitted on one of the cells; else
        "inferred" if a setting was chosen by looking at the number; else "predicted".

        Args:
            answer: the name of the entry that the number belongs to.
            field: the field of the cells' measurements that is compared.
            cells: all cells that our number is computed from.
        """
        if any(cell.key in fitted_cells(cell, field) for cell in cells):
            return "calibrated"
        for cell in cells:
            for inference in (*self.inferences, *load_cluster(cell.cluster).inferences):
                if inference.covers(answer, number, cell.variant):
                    return "inferred"
        return "predicted"


def fitted_cells(cell: Cell, field: str) -> set[str]:
    """The keys of the cells to which rates of the cell's cluster were fitted that change the field."""
    cluster = load_cluster(cell.cluster)
    keys: set[str] = set()
    for name, sourced in cluster.sourced:
        if field == CAPACITY_FIELD if name in CAPACITIES else field in TIMED:
            keys |= set(sourced.fitted_on)
    if field in TIMED:
        keys |= set(cluster.calibration_of(cell.precision).fitted_on)
    return keys


class Answer(StrictModel, ABC):
    """An entry of one section of a scenario file.

    Attributes:
        name: the name of the kind, and of its section of the file, a list of such entries.
        naming_field: the field that names an entry; no two entries of a scenario have the same name.
    """

    name: ClassVar[str]
    naming_field: ClassVar[str] = "claim"

    @property
    def entry_name(self) -> str:
        """The name of this entry."""
        return str(getattr(self, self.naming_field))

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        """Returns the published numbers that the entry compares; none if its kind compares something else.

        Args:
            folder: the folder of the scenario's file, where published files may be.

        Raises:
            UserError: the numbers cannot be read.
        """
        return []

    @abstractmethod
    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        """The cells among ``declared`` that this answer compares."""

    @abstractmethod
    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        """Mistakes in this entry that make a comparison impossible, as (key path within the entry, message).

        Args:
            declared: the scenario's cells, of one variant.
            folder: the folder of the scenario's file.
        """

    @abstractmethod
    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        """The comparisons of published numbers with ours, from results of one variant, cluster and engine."""

    @classmethod
    def compare_all(cls, entries: Sequence[Self], results: ScenarioResults) -> Iterator[Comparison]:
        """The comparisons of all of a scenario's entries of this kind, by variant, cluster and engine."""
        for part in results.split():
            for entry in entries:
                yield from entry.compare(part)


def answer_kinds() -> Mapping[str, type[Answer]]:
    """The classes of answers in the modules of the package, by their sections of a scenario file."""
    return named_classes(KINDS_PACKAGE, Answer)


@cache
def document_model() -> type[Document]:
    """:class:`Document` with a section, a list that may be left out, for each kind of answer."""
    sections: dict[str, Any] = {section: (list[kind], []) for section, kind in answer_kinds().items()}  # type: ignore[valid-type]
    return create_model("ScenarioDocument", __base__=Document, **sections)


def answers_of(scenario: Scenario, kind: type[AnswerT]) -> list[AnswerT]:
    """The entries of one kind of a scenario of :func:`load_scenario`, as the file orders them."""
    return getattr(scenario.document, kind.name)


def load_scenario(name: str | PathLike[str]) -> Scenario:
    """The packaged scenario of that name, or the one in the YAML file at that path, with its answers.

    Raises:
        UserError: there is no such scenario, or the file has a mistake; names file, key and mend.
    """
    return with_answers(load_cells(name))


def with_answers(scenario: Scenario) -> Scenario:
    """The scenario with its answers, checked.

    Raises:
        UserError: an answer has a mistake; names file, key and mend.
    """
    document = validate(document_model(), scenario.content, str(scenario.path))
    scenario = replace(scenario, document=document)
    for key_path, message in _mistakes(scenario):
        raise UserError(f"{scenario.path}: {Problem(key_path, message)}")
    return scenario


def compare(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """The comparisons of a scenario's published numbers with ours, for each variant, cluster and engine of
    the declared ``cells``; a number without a row has one too. UserError for an unreadable file."""
    results = ScenarioResults(cells, rows, scenario.path.parent, scenario.document.inferred_from)
    kinds = answer_kinds().values()
    return [entry for kind in kinds for entry in kind.compare_all(answers_of(scenario, kind), results)]


def set_beside(scenario: Scenario, ran: RanScenario) -> tuple[list[Comparison], list[Path]]:
    """The comparisons of a scenario with its answers, and the path of comparison.csv, which is written next
    to the results if there are any comparisons."""
    comparisons = compare(scenario, ran.declared, ran.known)
    return comparisons, [write_comparisons(comparisons, ran.path.parent)] if comparisons else []


# -- mistakes ------------------------------------------------------------------------------------------------


def _mistakes(scenario: Scenario) -> Iterator[Mistake]:
    """Mistakes in the answers and inferences of a scenario whose cells are right."""
    folder = scenario.path.parent
    entries: dict[str, Answer] = {}
    for section, kind in answer_kinds().items():
        for number, answer in enumerate(answers_of(scenario, kind)):
            if answer.entry_name in entries:
                message = f"{answer.entry_name!r} is there already; leave one out"
                yield [section, number, answer.naming_field], message
            entries[answer.entry_name] = answer
            for declared in scenario.cells.values():
                for path, message in answer.check(declared, folder):
                    yield [section, number, *path], message
                if not answer.selected(declared):
                    yield [section, number], "no group declares a cell that it speaks of"
    for number, inference in enumerate(scenario.document.inferred_from):
        for path, message in _wrong_inference(inference, entries, [*scenario.cells], folder):
            yield ["inferred_from", number, *path], message


def _wrong_inference(
    inference: InferredSetting, entries: Mapping[str, Answer], variants: Sequence[str], folder: Path
) -> Iterator[Mistake]:
    """Mistakes of an inference that names what the scenario lacks. ``entries``: all answers by name."""
    for index, variant in enumerate(inference.variants):
        yield from unknown(["variants", index], "unknown variant", variant, variants)
    for index, name in enumerate(inference.answers):
        if name not in entries:
            yield from unknown(["answers", index], "no answer is called", name, entries)
            return
        numbers = entries[name].numbers(folder)
        quantities = dict.fromkeys(number.quantity for number in numbers)
        for at, quantity in enumerate(inference.quantities):
            yield from unknown(["quantities", at], f"{name} has no", quantity, quantities)
        for at, row in enumerate(inference.rows):
            if not any(number.has(row) for number in numbers):
                yield ["rows", at], f"no row of {name} is {row}"
