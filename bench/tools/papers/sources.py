"""Published numbers: the CSV files that have them, and who published them: papers, and collections of what
many people published (measurements of real machines, step times, runs of mixtures of experts), each of which
is reproduced as one paper is. Golden values of Megatron-LM's tests may not be those of a case's arguments:
the values show which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.measure import Scenario
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.comparison import read_csv
from spbench.bench.yaml_files import PublishedNumber, StrictModel, finite, packaged, read_yaml

#: where published files of the package are
PACKAGES = tuple(f"spbench.results.{folder}" for folder in ("papers", "measured", "field", "experts"))

PAPERS_FILE = "papers.csv"
SOURCES_FILE = "sources.csv"
ALL = "all"
MEASURED, FIELD, EXPERTS = "measured", "field", "experts"
#: collections that are reproduced under these names, as one does a paper: the file of who measured, a title
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
    """Where a published number or formula stands: in the row of a CSV file whose ``key`` is the claim's name.

    The methods take that name and the scenario file's folder.
    """

    file: str
    key: str = "claim"
    column: str = "published"

    def source(self, claim: str) -> str:
        """FILE:ROW:COLUMN."""
        return f"{self.file}:{claim}:{self.column}"

    def text(self, claim: str, folder: Path) -> str:
        """The text at this place; UserError if there is no such file, row or column."""
        return self._row(claim, folder)[self.column]

    def number(self, claim: str, quantity: str, folder: Path) -> PublishedNumber:
        """The published number in the claim's row, as a number of this quantity; UserError if it is none."""
        row = self._row(claim, folder)
        text = row[self.column]
        try:
            return PublishedNumber(self.source(claim), quantity, finite(text), row)
        except ValueError as error:
            raise UserError(f"{self.file}: {self.column} of {claim!r} is not a number: {text!r}") from error

    def _row(self, claim: str, folder: Path) -> dict[str, str]:
        path, columns, rows = published_file(self.file, folder)
        for name in (self.key, self.column):
            if name not in columns:
                raise UserError(f"{path}: no column {name!r}{suggestion(name, columns)}")
        named = [row for row in rows if row[self.key] == claim]
        if len(named) > 1:
            raise UserError(f"{path}: {len(named)} rows have {self.key} {claim!r}")
        if not named:
            hint = suggestion(claim, [row[self.key] for row in rows])
            raise UserError(f"{path}: no row has {self.key} {claim!r}{hint}")
        return named[0]


# -- who published -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper:
    """A paper, by the name that commands take.

    Attributes:
        finding: a sentence or two about the paper, where its numbers alone mislead.
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
    """A file of measurements: who measured them, at which commit of their repository, on which machines."""

    file: str
    measured_by: str
    commit: str
    machines: str


def measured_sources() -> list[MeasuredSource]:
    """The sources of results/measured/sources.csv, in its order."""
    rows = published_file(SOURCES_FILE).rows
    return [MeasuredSource(row["file"], row["measured by"], row["commit"], row["machines"]) for row in rows]


def papers() -> dict[str, Paper]:
    """The papers of results/papers/papers.csv by name, then the collections."""
    listed = [
        Paper(row["paper"], row["source"], row["title"], row["finding"])
        for row in published_file(PAPERS_FILE).rows
    ]
    for name, (file, title) in COLLECTIONS.items():
        rows = published_file(file).rows
        who = [row["measured by"] + (f" ({row['commit']})" if "commit" in row else "") for row in rows]
        listed.append(Paper(name, ", ".join(dict.fromkeys(who)), title))
    return {paper.name: paper for paper in listed}


def unknown_paper(name: str) -> str:
    """The message on a scenario's paper that is not reproduced; "" for papers that are."""
    of_papers = [text for paper in papers().values() for text in (paper.name, paper.source)]
    known = [text for text in of_papers if ", " not in text]  # the sources of measurements are many
    return "" if name in ("", *known) else f"paper: unknown paper {shown(name)}{suggestion(name, known)}"


def one_of(paper: Paper, scenarios: Sequence[Scenario], name: str) -> Scenario:
    """The scenario of a paper that has that name; UserError if none has."""
    by_name = {scenario.name: scenario for scenario in scenarios}
    if name not in by_name:
        raise UserError(f"no scenario {name!r} answers to {paper.name}{suggestion(name, by_name)}")
    return by_name[name]


def scenarios_of(name: str) -> list[tuple[Paper, list[Scenario]]]:
    """A paper, or with "all" every paper that has any, with the packaged scenarios that name it by its name
    or its source; UserError if there is no such paper, no scenario names it, or a scenario is wrong."""
    named = papers()
    if name not in (*named, ALL):
        raise UserError(f"unknown paper {name!r}{suggestion(name, [*named, ALL])}")
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


GOLDEN_FILES = ("megatron_lm_goldens.csv", "megatron_lm_goldens_more.csv", "megatron_moe_goldens.csv")
#: quantities of memory that golden values have
MEMORY = ("peak_first", "peak_last", "allocated_last")
GPUS = ("a100", "h100", "gb200")
#: the end of a golden value's name: of the run that goes on from a checkpoint
RESUMED = "_2nd"


def machine_of(golden: str) -> tuple[str, bool]:
    """The kind of machine of a golden value, A100 where its name has none, and whether the run went on from
    a checkpoint."""
    return next((gpu for gpu in GPUS if gpu in golden), "a100"), golden.endswith(RESUMED)


def varies_by(cell: Cell) -> str:
    """What decides how many rows a rank's experts get, if the cell does not: "routing", what the router has
    learned, or "sinkhorn", which shares each rank's own tokens out evenly, but for ties. "": no experts are
    spread over ranks, a capacity is filled up, or tokens are forced to be even."""
    options = dict(cell.model_options)
    spread = cell.sizes.by_axis.get("ep", 1) > 1
    filled = options.get("capacity") is not None and bool(options.get("capacity_padded"))
    if not options.get("experts") or not spread or filled or "routing" in options:
        return ""
    return "sinkhorn" if options.get("router") == "sinkhorn" else "routing"


def departures(varying: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """For each (case, golden value) that may not be of the case's arguments in this release, the reason that
    the values show. "as CASE GOLDEN": all values of lts are those of another case or of dev. "machine": an
    A100's step takes as long as an H100's and leaves as much allocated. "release": the first peak of lts is
    over 5% from each of dev. "checkpoint": a run that went on from one has its largest peak before its first
    step ends. Else: what the case is ``varying`` by."""
    found: dict[tuple[str, str], str] = {}
    before: dict[tuple[str, ...], tuple[str, str]] = {}
    rows = [row for file in GOLDEN_FILES for row in published_file(file).rows]
    of_h100 = {row["case"]: row for row in rows if row["golden"] == "dev_dgx_h100"}
    of_dev: dict[str, list[float]] = {}
    for row in rows:
        if row["golden"].startswith("dev") and row["peak_first"] and not machine_of(row["golden"])[1]:
            of_dev.setdefault(row["case"], []).append(float(row["peak_first"]))
    for row in rows:
        place, first = (row["case"], row["golden"]), row["peak_first"]
        values = tuple(row[quantity] for quantity in MEMORY)
        other = before.setdefault(values, place) if all(values) else place
        another = other[0] != place[0] or other[1][:3] != place[1][:3]
        if place[1].startswith("lts") and another:
            found[place] = f"as {' '.join(other)}"
        elif machine_of(place[1])[0] == "a100" and _alike(row, of_h100.get(place[0])):
            found[place] = "machine"
        elif place[1].startswith("lts") and first and _far(float(first), of_dev.get(place[0], [])):
            found[place] = "release"
        elif place[1].endswith(RESUMED) and first == row["peak_last"]:
            found[place] = "checkpoint"
        elif kind := varying.get(place[0]):
            found[place] = kind
    return found


def _alike(row: Mapping[str, str], other: Mapping[str, str] | None) -> bool:
    """Whether a golden value has the step time of another within 2%, and its memory at the end within 1 MiB:
    of an A100 and an H100 workspaces alone differ by more, and steps of the same work by a third."""
    if other is None or not all(each["iter_s"] and each["allocated_last"] for each in (row, other)):
        return False
    last, time = (abs(float(row[name]) - float(other[name])) for name in ("allocated_last", "iter_s"))
    return last < 2**20 and time < 0.02 * float(other["iter_s"])


def _far(value: float, others: Sequence[float]) -> bool:
    """Whether a value is further than 5% from each of some others."""
    return bool(others) and all(abs(value / each - 1) > 0.05 for each in others)


def publishers() -> Callable[[str], str]:
    """A function from the ``source`` of a record to who published it: the figures and tables of a paper are
    one, under the first word of their files' names."""
    rows = [row for file, _ in COLLECTIONS.values() for row in published_file(file).rows]
    measured_by = {row["file"]: row["measured by"] for row in rows}

    def publisher(source: str) -> str:
        file = source.partition(":")[0]
        return measured_by.get(file) or file.partition("_")[0].upper()

    return publisher
