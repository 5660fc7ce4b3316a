"""The papers that are reproduced, and the measurements of real machines, which count as one: their names,
and the scenarios that answer to each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spbench.bench.config.scenario import Scenario, load_scenario
from spbench.bench.errors import UserError, suggestion
from spbench.bench.published.published import published_rows
from spbench.bench.reproduction.measured_sources import MEASURED, measured_sources
from spbench.bench.yaml_files import packaged

PAPERS_FILE = "papers.csv"
ALL = "all"


@dataclass(frozen=True)
class Paper:
    """A paper, by the name that commands take."""

    name: str
    source: str
    title: str

    @property
    def label(self) -> str:
        """A word for headings: an acronym, or "Measured"."""
        return self.name.capitalize() if self.name == MEASURED else self.name.upper()


def papers() -> dict[str, Paper]:
    """The papers of results/papers/papers.csv by name, then the measurements of results/measured."""
    _, _, rows = published_rows(PAPERS_FILE, Path())
    found = {row["paper"]: Paper(row["paper"], row["source"], row["title"]) for row in rows}
    sources = ", ".join(f"{source.measured_by} ({source.commit})" for source in measured_sources())
    return {**found, MEASURED: Paper(MEASURED, sources, "What real machines measured")}


def scenarios_of(name: str) -> list[tuple[Paper, list[Scenario]]]:
    """A paper, or with "all" every paper that has any, with the packaged scenarios that name it by its name
    or its source.

    Raises:
        UserError: there is no such paper, no scenario names it, or a scenario is wrong.
    """
    known = papers()
    if name not in (*known, ALL):
        raise UserError(f"unknown paper {name!r}{suggestion(name, [*known, ALL])}")
    loaded = [load_scenario(scenario) for scenario in packaged("spbench.scenarios")]
    wanted = list(known.values()) if name == ALL else [known[name]]
    found = [
        (paper, [s for s in loaded if s.document.paper in (paper.name, paper.source)]) for paper in wanted
    ]
    found = [(paper, scenarios) for paper, scenarios in found if scenarios]
    if not found:
        raise UserError(f"no scenario answers to {name} yet")
    return found
