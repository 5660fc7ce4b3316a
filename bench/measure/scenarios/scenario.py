"""Scenarios: YAML files that declare cells, and which published numbers they answer to.

Each group is a cell whose model, strategy, batch, seq_len, precision, cluster, engine and sizes may be lists,
and whose mesh, a list of axes, may be a list of such lists; lists multiply. Nested settings merge deeply:
defaults, then the group, then the variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.choices import unknown
from spbench.bench.measure.scenarios.expand import Problem, expand
from spbench.bench.published_number import InferredSetting
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import Answer, Mistake, answer_kinds, wrong_inference
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.published_results import ScenarioResults
from spbench.bench.yaml_files import find_file, read_yaml, validate
from spbench.plots import FIGURES

PACKAGE = "spbench.scenarios"

AnswerT = TypeVar("AnswerT", bound=Answer)


class Document(BaseModel):
    """A scenario file as it is written; :func:`document_model` adds a section for each kind of answer.

    Attributes:
        paper: what it reproduces, by its name or source in results/papers/papers.csv, or "measured": what
            real machines measured, or "field": step times that others published.
        published_in: the paper that the numbers are from, where it is another one, which stands on the pages
            of ``paper`` and is judged by itself there; such as "LASP-2, arXiv 2502.07563".
        inferred_from: settings chosen by looking at published numbers, and which these are.
        not_reproduced: one line for REPRODUCE.md: which published numbers are not met, and why.
        figure: the name of a figure of plots/, as `spbench list figures` tells it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str = ""
    published_in: str = ""
    about: str = ""
    defaults: dict[str, Any] = {}
    groups: list[dict[str, Any]] = Field(min_length=1)
    variants: dict[str, dict[str, Any]] = {}
    inferred_from: list[InferredSetting] = []
    not_reproduced: str = ""
    figure: str | None = None


@cache
def document_model() -> type[Document]:
    """:class:`Document` with a section, a list that may be left out, for each kind of answer."""
    sections: dict[str, Any] = {section: (list[kind], []) for section, kind in answer_kinds().items()}  # type: ignore[valid-type]
    return create_model("ScenarioDocument", __base__=Document, **sections)


@dataclass(frozen=True)
class Scenario:
    """A scenario file, checked. ``cells``: the declared cells of each variant; a scenario without variants
    has one, named ""."""

    name: str
    path: Path
    document: Document
    cells: Mapping[str, Sequence[Cell]]

    def answers(self, kind: type[AnswerT]) -> list[AnswerT]:
        """Its answers of one kind, as the file orders them."""
        return getattr(self.document, kind.name)


def load_scenario(name: str | PathLike[str]) -> Scenario:
    """The packaged scenario of that name, or the one in the YAML file at that path; UserError, with
    file, key and mend, if there is none or something in it cannot be."""
    path = find_file(name, PACKAGE, "scenario")
    document = validate(document_model(), read_yaml(path), str(path))
    if document.figure is not None and document.figure not in FIGURES:
        raise UserError(f"{path}: figure: {unknown('figure', document.figure, FIGURES.names())}")
    if "all" in document.variants:
        raise UserError(f"{path}: variants.all: 'all' stands for every variant; choose another name")
    try:
        cells = {
            variant: expand(document.defaults, document.groups, document.variants, variant, path.parent)
            for variant in document.variants or [""]
        }
        scenario = Scenario(path.stem, path, document, cells)
        for key_path, message in _mistakes(scenario):
            raise Problem(key_path, message)
    except Problem as problem:
        raise UserError(f"{path}: {problem}") from problem
    return scenario


def _mistakes(scenario: Scenario) -> Iterator[Mistake]:
    """What is wrong with the answers and inferences of a scenario whose cells are right."""
    folder = scenario.path.parent
    found: dict[str, Answer] = {}
    for section, kind in answer_kinds().items():
        for number, answer in enumerate(scenario.answers(kind)):
            if answer.entry_name in found:
                message = f"{answer.entry_name!r} is there already; leave one out"
                yield [section, number, answer.naming_field], message
            found[answer.entry_name] = answer
            for declared in scenario.cells.values():
                for path, message in answer.check(declared, folder):
                    yield [section, number, *path], message
                if not answer.selected(declared):
                    yield [section, number], "no group declares a cell that it speaks of"
    for number, inference in enumerate(scenario.document.inferred_from):
        for path, message in wrong_inference(inference, [*found.values()], [*scenario.cells], folder):
            yield ["inferred_from", number, *path], message


def compare(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """The published numbers of a scenario beside ours, in each variant, cluster and engine among the declared
    ``cells``; an answer without any of the ``rows``, by key, stays. UserError for an unreadable file."""
    results = ScenarioResults(cells, rows, scenario.path.parent, scenario.document.inferred_from)
    kinds = answer_kinds().values()
    return [entry for kind in kinds for entry in kind.compare_all(scenario.answers(kind), results)]
