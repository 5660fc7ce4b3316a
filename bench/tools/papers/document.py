"""The generated parts of REPRODUCE.md, README.md and results/reproduction/PAPER.md.

A part stands between lines ``<!-- spbench reproduce PAPER: NAME -->`` and ``<!-- end -->``. REPRODUCE.md has
a part named ``verdict`` for each paper; PAPER.md has one for each of its scenarios, under the scenario's
name. README.md has a part named ``validation`` of the measurements of real machines, and one named ``ladder``
of the longest sequences that others published. All else is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import write_whole
from spbench.bench.tools.papers.paper_findings import Line, PaperFindings, markdown
from spbench.bench.tools.papers.sources import FIELD, MEASURED, papers
from spbench.bench.tools.papers.validation import ladder_lines, validation_lines

SUMMARY_PAGE = Path("REPRODUCE.md")
FIRST_PAGE = Path("README.md")
DETAILS_FOLDER = Path("results", "reproduction")

VERDICT = "verdict"
#: by paper, the name of its part of README.md, and what makes that of the paper's records
_OF_FIRST_PAGE = {MEASURED: ("validation", validation_lines), FIELD: ("ladder", ladder_lines)}
_PART = re.compile(
    r"(?P<begin>^<!-- spbench reproduce (?P<paper>[\w-]+): (?P<name>[\w-]+) -->\n)"
    r"(?P<text>.*?)(?P<end>^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
_BEGIN = re.compile(r"^<!-- spbench reproduce ", re.MULTILINE)


def parts_of(paper: str, scenarios: Sequence[str]) -> dict[Path, Sequence[str]]:
    """The documents on a paper, below the working directory, with the names of their generated parts."""
    documents = {SUMMARY_PAGE: [VERDICT], _details(paper): scenarios}
    return documents | {FIRST_PAGE: [_OF_FIRST_PAGE[paper][0]]} if paper in _OF_FIRST_PAGE else documents


def _details(paper: str) -> Path:
    return DETAILS_FOLDER / f"{paper}.md"


def check_documents(paper: str, scenarios: Sequence[str]) -> None:
    """Refuse documents that have not one part of the paper under each of their names, and no other; UserError
    also if one cannot be read, or a part has no end."""
    for path, names in parts_of(paper, scenarios).items():
        text = _read(path)
        parts = list(_PART.finditer(text))
        if len(_BEGIN.findall(text)) != len(parts):
            what = "a part begins that does not end with <!-- end -->, or has no PAPER: NAME"
            raise UserError(f"{path}: {what}")
        there = [part["name"] for part in parts if part["paper"] == paper]
        for name in there:
            if name not in names:
                raise UserError(f"{path}: it can have no part {name!r} of {paper}{suggestion(name, names)}")
        if missing := [name for name in names if name not in there]:
            add = f"add <!-- spbench reproduce {paper}: {missing[0]} --> and <!-- end --> to it"
            raise UserError(f"{path} has no part for {', '.join(missing)}: {add}")


def rendered_documents(findings: PaperFindings) -> dict[Path, str]:
    """By path, the text of each document with the parts of the findings' paper written anew; UserError if one
    cannot be read, or nothing was reproduced under the name of one of its parts."""
    details = _details(findings.paper).as_posix()
    paths = parts_of(findings.paper, findings.scenarios)
    return {path: _rendered(_read(path), findings, details) for path in paths}


def write_documents(findings: PaperFindings) -> list[Path]:
    """Write the documents, each whole or not at all, once the text of all is known; returns the paths.
    UserError as of :func:`rendered_documents`, or if one cannot be written, which is then as it was."""
    return [write_whole(path, text) for path, text in rendered_documents(findings).items()]


def write_part(path: Path, paper: str, name: str, content: str) -> Path:
    """Write one part of a document anew; UserError if the document cannot be read or written, or has no such
    part."""
    text = _read(path)
    if (paper, name) not in [(part["paper"], part["name"]) for part in _PART.finditer(text)]:
        add = f"add <!-- spbench reproduce {paper}: {name} --> and <!-- end --> to it"
        raise UserError(f"{path} has no part for {name}: {add}")
    return write_whole(path, _replaced(text, paper, lambda part: content if part == name else None))


def _replaced(text: str, paper: str, content: Callable[[str], str | None]) -> str:
    """A document with the parts of a paper written anew.

    Args:
        content: returns the text of a part by its name; None: the part stays as it is.
    """

    def part(match: re.Match[str]) -> str:
        new = content(match["name"]) if match["paper"] == paper else None
        return match[0] if new is None else f"{match['begin']}{new}{match['end']}"

    return _PART.sub(part, text)


def _rendered(text: str, findings: PaperFindings, details: str) -> str:
    """A document with the parts of the findings' paper written anew; the verdict links to ``details``."""
    first_page, first_page_lines = _OF_FIRST_PAGE.get(findings.paper, ("", None))

    def content(name: str) -> str:
        if name == VERDICT:
            finding = papers()[findings.paper].finding if findings.paper in papers() else ""
            return "\n\n".join(filter(None, [finding, markdown(_linked(findings, details))]))
        if first_page_lines and name == first_page:
            return markdown(first_page_lines(findings.records))
        return findings.part(name)

    return _replaced(text, findings.paper, content)


def _linked(findings: PaperFindings, details: str) -> list[Line]:
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
