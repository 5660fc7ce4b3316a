"""The CSV files of published numbers, and who published these: papers, and collections of numbers from many
people (measurements of real machines, step times, runs of mixtures of experts), each of which is reproduced
like one paper; and the values of published formulas."""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from spbench.bench.errors import UserError, refuse_unknown, shown, suggestion
from spbench.bench.measure import Scenario
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.comparison import read_csv
from spbench.bench.yaml_files import PublishedNumber, StrictModel, finite, packaged, read_yaml

#: packages that have published files
PACKAGES = tuple(f"spbench.results.{folder}" for folder in ("papers", "measured", "field", "experts"))

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}

PAPERS_FILE = "papers.csv"
SOURCES_FILE = "sources.csv"
ALL = "all"
MEASURED, FIELD, EXPERTS = "measured", "field", "experts"
#: collections that are reproduced by name like papers: (file of their sources, title)
COLLECTIONS = {
    MEASURED: (SOURCES_FILE, "What real machines measured"),
    FIELD: ("field_sources.csv", "Step times that others published"),
    EXPERTS: ("experts_sources.csv", "Mixtures of experts that others measured"),
}


class PublishedFile(NamedTuple):
    """A published file: its path, the names of its columns, and its rows of texts."""

    path: Path
    columns: Sequence[str]
    rows: Sequence[dict[str, str]]


def published_file(file: str, beside: Path | None = None) -> PublishedFile:
    """A published file in the folder ``beside``, or else one that comes with the package.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    folders = [Path(str(files(package))) for package in PACKAGES]
    path = next((at for folder in (beside or Path(), *folders) if (at := folder / file).is_file()), None)
    if path is None:
        names = [at.name for folder in folders for at in folder.glob("*.csv")]
        raise UserError(
            f"cannot read published file {file}: No such file or directory{suggestion(file, names)}"
        )
    return PublishedFile(path, *read_csv(path))


class PublishedPlace(StrictModel):
    """The place of a published number or formula: a CSV file, ``column``, and the row with the claim as
    ``key``.

    The methods take the claim's name and the scenario file's folder.
    """

    file: str
    key: str = "claim"
    column: str = "published"

    def source(self, claim: str) -> str:
        """The place as text, FILE:ROW:COLUMN."""
        return f"{self.file}:{claim}:{self.column}"

    def text(self, claim: str, folder: Path) -> str:
        """The text at this place; UserError if there is no such file, row or column."""
        return self._row(claim, folder)[self.column]

    def number(self, claim: str, quantity: str, folder: Path) -> PublishedNumber:
        """The published number in the claim's row, as a number of this quantity; UserError if the text is no
        number."""
        row = self._row(claim, folder)
        text = row[self.column]
        try:
            return PublishedNumber(self.source(claim), quantity, finite(text), row)
        except ValueError as error:
            raise UserError(f"{self.file}: {self.column} of {claim!r} is not a number: {text!r}") from error

    def _row(self, claim: str, folder: Path) -> dict[str, str]:
        path, columns, rows = published_file(self.file, folder)
        for name in (self.key, self.column):
            refuse_unknown(f"{path}: no column", name, columns)
        named = [row for row in rows if row[self.key] == claim]
        if len(named) > 1:
            raise UserError(f"{path}: {len(named)} rows have {self.key} {claim!r}")
        refuse_unknown(f"{path}: no row has {self.key}", claim, [row[self.key] for row in rows])
        return named[0]


# -- who published -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper:
    """A paper, by the name that commands take.

    Attributes:
        finding: a sentence or two about the paper, if its numbers without words mislead.
    """

    name: str
    source: str
    title: str
    finding: str = ""

    @property
    def label(self) -> str:
        """A word for headings: an acronym, or a collection's name."""
        return self.name.capitalize() if self.name in COLLECTIONS else self.name.upper()


class MeasuredSource(NamedTuple):
    """A file of a collection: who measured its numbers, at which commit of their repository ("": the list of
    sources does not say), on which machines."""

    file: str
    measured_by: str
    commit: str
    machines: str


def measured_sources(collection: str = MEASURED) -> list[MeasuredSource]:
    """The sources of a collection, by default of results/measured/sources.csv, in the order of its file."""
    rows = published_file(COLLECTIONS[collection][0]).rows
    places = ("file", "measured by", "commit", "machines")
    return [MeasuredSource(*(row.get(name, "") for name in places)) for row in rows]


def papers() -> dict[str, Paper]:
    """The papers of results/papers/papers.csv by name, then the collections."""
    listed = [
        Paper(row["paper"], row["source"], row["title"], row["finding"])
        for row in published_file(PAPERS_FILE).rows
    ]
    for name, (_, title) in COLLECTIONS.items():
        who = [each.measured_by + f" ({each.commit})" * bool(each.commit) for each in measured_sources(name)]
        listed.append(Paper(name, ", ".join(dict.fromkeys(who)), title))
    return {paper.name: paper for paper in listed}


def unknown_paper(name: str) -> str:
    """The message on a scenario's paper that is not reproduced; "" for papers that are."""
    of_papers = [text for paper in papers().values() for text in (paper.name, paper.source)]
    known = [text for text in of_papers if ", " not in text]  # the sources of measurements are many
    return "" if name in ("", *known) else f"paper: unknown paper {shown(name)}{suggestion(name, known)}"


def one_of(paper: Paper, scenarios: Sequence[Scenario], name: str) -> Scenario:
    """The scenario called ``name`` among a paper's scenarios; UserError if there is none."""
    by_name = {scenario.name: scenario for scenario in scenarios}
    if name not in by_name:
        raise UserError(f"no scenario {name!r} answers to {paper.name}{suggestion(name, by_name)}")
    return by_name[name]


def scenarios_of(name: str) -> list[tuple[Paper, list[Scenario]]]:
    """(paper, packaged scenarios that name the paper or its source), for one paper, or with "all" for every
    paper that has any; UserError if there is no such paper, no scenario names it, or one is wrong."""
    named = papers()
    refuse_unknown("unknown paper", name, [*named, ALL])
    wanted = list(named.values()) if name == ALL else [named[name]]
    loaded = [
        load_scenario(scenario)
        for scenario, file in packaged("spbench.scenarios").items()
        if name == ALL or read_yaml(file).get("paper") in (named[name].name, named[name].source)
    ]
    answering = [(p, [s for s in loaded if s.document.paper in (p.name, p.source)]) for p in wanted]
    if not any(scenarios for _, scenarios in answering):
        raise UserError(f"no scenario answers to {name} yet")
    return [(paper, scenarios) for paper, scenarios in answering if scenarios]


def publishers() -> Callable[[str], str]:
    """A function from the ``source`` of a record to its publisher; for a paper's figures and tables that is
    the first word of their files' names."""
    measured_by = {each.file: each.measured_by for name in COLLECTIONS for each in measured_sources(name)}

    def publisher(source: str) -> str:
        file = source.partition(":")[0]
        return measured_by.get(file) or file.partition("_")[0].upper()

    return publisher


# -- formulas ------------------------------------------------------------------------------------------------


def evaluate(formula: str, letters: Mapping[str, float]) -> float:
    """The value of sums, products, quotients and powers of numbers and letters, in floating point; UserError
    if something else stands in the formula, a letter has no value, or the result is no finite number."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=letter) if letter in letters:
                return float(letters[letter])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise UserError(
            f"cannot evaluate {ast.unparse(node)!r} in the formula {formula!r}; "
            f"it may hold numbers, + - * / ** and {', '.join(letters)}"
        )

    try:
        result = value(ast.parse(formula, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"cannot evaluate the formula {formula!r}: {error}") from error
    if isinstance(result, complex) or not math.isfinite(result):
        raise UserError(f"the formula {formula!r} gives {result}; a finite number is needed")
    return result
