"""Scenarios: YAML files that declare cells. :mod:`tools.papers.answer` reads and checks what else a file has:
sections of published numbers, to which the cells answer.

Each group is a cell whose model, strategy, batch, seq_len, precision, cluster, engine and sizes may be lists,
and whose mesh, a list of axes, may be a list of such lists; lists multiply. Nested settings merge deeply:
defaults, then the group, then the variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.choices import unknown
from spbench.bench.measure.scenarios.expand import Problem, expand
from spbench.bench.published_number import InferredSetting
from spbench.bench.yaml_files import find_file, read_yaml, validate
from spbench.plots import FIGURES

PACKAGE = "spbench.scenarios"


class Document(BaseModel):
    """A scenario file as it is written, without its sections of answers.

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


@dataclass(frozen=True)
class Scenario:
    """A scenario file, checked. ``cells``: the declared cells of each variant; a scenario without variants
    has one, named ""."""

    name: str
    path: Path
    document: Document
    cells: Mapping[str, Sequence[Cell]]


def load_scenario(name: str | PathLike[str], model: type[Document] = Document) -> Scenario:
    """The packaged scenario of that name, or the one in the YAML file at that path.

    Args:
        model: of the whole file. :class:`Document` has no sections of answers: it leaves out lists under
            other keys than its own.

    Raises:
        UserError: there is none, or something in it cannot be; names file, key and mend.
    """
    path = find_file(name, PACKAGE, "scenario")
    content = read_yaml(path)
    if model is Document:
        fields = Document.model_fields
        content = {key: each for key, each in content.items() if key in fields or not isinstance(each, list)}
    document = validate(model, content, str(path))
    if document.figure is not None and document.figure not in FIGURES:
        raise UserError(f"{path}: figure: {unknown('figure', document.figure, FIGURES.names())}")
    if "all" in document.variants:
        raise UserError(f"{path}: variants.all: 'all' stands for every variant; choose another name")
    try:
        cells = {
            variant: expand(document.defaults, document.groups, document.variants, variant, path.parent)
            for variant in document.variants or [""]
        }
    except Problem as problem:
        raise UserError(f"{path}: {problem}") from problem
    return Scenario(path.stem, path, document, cells)
