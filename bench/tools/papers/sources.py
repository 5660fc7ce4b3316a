"""The papers that are reproduced, the measurements of real machines, which count as one, and the step times
that others published, which count as another: their names, their sources, and the scenarios that answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.files import published_rows
from spbench.bench.yaml_files import packaged

PAPERS_FILE = "papers.csv"
SOURCES_FILE = "sources.csv"
FIELD_SOURCES_FILE = "field_sources.csv"
ALL = "all"
#: the name under which all measurements of real machines are reproduced, as one does a paper
MEASURED = "measured"
#: the name under which the step times that others published are reproduced
FIELD = "field"


@dataclass(frozen=True)
class Paper:
    """A paper, by the name that commands take.

    Attributes:
        finding: what was found of it, in a sentence or two, where its numbers alone mislead.
    """

    name: str
    source: str
    title: str
    finding: str = ""

    @property
    def label(self) -> str:
        """A word for headings: an acronym, or "Measured" or "Field"."""
        return self.name.capitalize() if self.name in (MEASURED, FIELD) else self.name.upper()


@dataclass(frozen=True)
class MeasuredSource:
    """A file of measurements: who measured them, at which commit of their repository, on which machines."""

    file: str
    measured_by: str
    commit: str
    machines: str


def measured_sources() -> list[MeasuredSource]:
    """The sources of results/measured/sources.csv, in its order."""
    _, _, rows = published_rows(SOURCES_FILE, Path())
    return [MeasuredSource(row["file"], row["measured by"], row["commit"], row["machines"]) for row in rows]


def papers() -> dict[str, Paper]:
    """The papers of results/papers/papers.csv by name, then the measurements of results/measured, and the
    step times of results/field."""
    _, _, rows = published_rows(PAPERS_FILE, Path())
    named = {row["paper"]: Paper(row["paper"], row["source"], row["title"], row["finding"]) for row in rows}
    sources = ", ".join(f"{source.measured_by} ({source.commit})" for source in measured_sources())
    _, _, rows = published_rows(FIELD_SOURCES_FILE, Path())
    field = ", ".join(dict.fromkeys(row["measured by"] for row in rows))
    return {
        **named,
        MEASURED: Paper(MEASURED, sources, "What real machines measured"),
        FIELD: Paper(FIELD, field, "Step times that others published"),
    }


def unknown_paper(name: str) -> str:
    """What to say of a scenario's paper that is none of those that are reproduced; "" of others."""
    of_papers = [text for paper in papers().values() for text in (paper.name, paper.source)]
    known = [text for text in of_papers if ", " not in text]  # the sources of measurements are many
    return "" if name in ("", *known) else f"paper: unknown paper {shown(name)}{suggestion(name, known)}"


def one_of(paper: Paper, scenarios: Sequence[Scenario], name: str) -> Scenario:
    """The scenario of a paper that has that name; UserError if none has."""
    found = {scenario.name: scenario for scenario in scenarios}
    if name not in found:
        raise UserError(f"no scenario {name!r} answers to {paper.name}{suggestion(name, [*found])}")
    return found[name]


def scenarios_of(name: str) -> list[tuple[Paper, list[Scenario]]]:
    """A paper, or with "all" every paper that has any, with the packaged scenarios that name it by its name
    or its source; UserError if there is no such paper, no scenario names it, or a scenario is wrong."""
    known = papers()
    if name not in (*known, ALL):
        raise UserError(f"unknown paper {name!r}{suggestion(name, [*known, ALL])}")
    loaded = [load_scenario(scenario) for scenario in packaged("spbench.scenarios")]
    wanted = list(known.values()) if name == ALL else [known[name]]
    answering = [(p, [s for s in loaded if s.document.paper in (p.name, p.source)]) for p in wanted]
    if not any(scenarios for _, scenarios in answering):
        raise UserError(f"no scenario answers to {name} yet")
    return [(paper, scenarios) for paper, scenarios in answering if scenarios]
