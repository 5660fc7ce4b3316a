"""The generated parts of REPRODUCE.md, README.md and results/reproduction/PAPER.md.

A part stands between lines ``<!-- spbench reproduce PAPER: NAME -->`` and ``<!-- end -->``. REPRODUCE.md has
a part named ``verdict`` for each paper; PAPER.md has one for each of its scenarios, under the scenario's
name. README.md has a part named ``validation`` of the measurements of real machines. All else is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spbench.bench.atomic_write import write_whole
from spbench.bench.errors import UserError, suggestion
from spbench.bench.reproduction.findings import Findings, Line, markdown
from spbench.bench.reproduction.papers import MEASURED
from spbench.bench.reproduction.validation import validation_lines

SUMMARY_PAGE = Path("REPRODUCE.md")
FIRST_PAGE = Path("README.md")
DETAILS_FOLDER = Path("results", "reproduction")

VERDICT = "verdict"
VALIDATION = "validation"
_PART = re.compile(
    r"(?P<begin>^<!-- spbench reproduce (?P<paper>[\w-]+): (?P<name>[\w-]+) -->\n)"
    r"(?P<text>.*?)(?P<end>^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
_BEGIN = re.compile(r"^<!-- spbench reproduce ", re.MULTILINE)


@dataclass(frozen=True)
class Pages:
    """The documents on a paper.

    Attributes:
        page: has the verdict.
        details: has a part for each scenario.
        first: has the table of errors by who measured; None for papers.
    """

    page: Path
    details: Path
    first: Path | None = None

    @classmethod
    def of(cls, paper: str) -> Pages:
        """The documents of a paper, below the working directory."""
        first = FIRST_PAGE if paper == MEASURED else None
        return cls(SUMMARY_PAGE, DETAILS_FOLDER / f"{paper}.md", first)

    def check(self, paper: str, scenarios: Sequence[str]) -> None:
        """Refuse documents that the parts of a paper cannot be written into; UserError if one cannot be read,
        a part has no end or another name, or a part is missing."""
        check_parts(self.page, paper, [VERDICT])
        check_parts(self.details, paper, scenarios)
        if self.first is not None:
            check_parts(self.first, paper, [VALIDATION])

    def rendered(self, findings: Findings) -> dict[Path, str]:
        """By path, the text of each document with the parts of the findings' paper written anew; UserError if
        one cannot be read, or nothing was reproduced under the name of one of its parts."""
        paths = filter(None, (self.page, self.details, self.first))
        return {path: rendered(_read(path), findings, self.details.as_posix()) for path in paths}

    def write(self, findings: Findings) -> list[Path]:
        """Write the documents, each whole or not at all, once the text of all is known; returns the paths.
        UserError as of :meth:`rendered`, or if one cannot be written, which is then as it was."""
        return [write_whole(path, text) for path, text in self.rendered(findings).items()]


def check_parts(path: Path, paper: str, names: Sequence[str]) -> None:
    """Refuse a document that has not one part of the paper under each of these names, and no other;
    UserError also if it cannot be read, or a part has no end."""
    text = _read(path)
    parts = list(_PART.finditer(text))
    if len(_BEGIN.findall(text)) != len(parts):
        raise UserError(f"{path}: a part begins that does not end with <!-- end -->, or has no PAPER: NAME")
    there = [part["name"] for part in parts if part["paper"] == paper]
    for name in there:
        if name not in names:
            raise UserError(f"{path}: it can have no part {name!r} of {paper}{suggestion(name, names)}")
    if missing := [name for name in names if name not in there]:
        marker = f"<!-- spbench reproduce {paper}: {missing[0]} -->"
        raise UserError(f"{path} has no part for {', '.join(missing)}: add {marker} and <!-- end --> to it")


def rendered(text: str, findings: Findings, details: str) -> str:
    """A document with the parts of the findings' paper written anew. ``details`` is the link from the verdict
    to the details. UserError if a part has a name under which nothing was reproduced."""

    def part(match: re.Match[str]) -> str:
        if match["paper"] != findings.paper:
            return match[0]
        if match["name"] == VERDICT:
            content = markdown(_linked(findings, details))
        elif match["name"] == VALIDATION:
            content = markdown(validation_lines(findings.records))
        else:
            content = findings.part(match["name"])
        return f"{match['begin']}{content}{match['end']}"

    return _PART.sub(part, text)


def _linked(findings: Findings, details: str) -> list[Line]:
    """The verdict, with a link from each scenario's title to its details, once for all of its lines."""
    lines: list[Line] = []
    above = ""
    for line in findings.verdict():
        scenario = line.pop("scenario")
        document = findings.documents.get(scenario)
        title = f"[{document.title}]({details}#{scenario})" if document else "**all of the paper**"
        lines.append({"table or figure": "" if title == above else title, **line})
        above = title
    return lines


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
