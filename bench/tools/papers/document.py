"""The generated parts of REPRODUCE.md, results/reproduction/PAPER.md, README.md and pages of docs.

A part stands between lines ``<!-- spbench reproduce PAPER: NAME -->`` and ``<!-- end -->``; all else is left
alone. A paper has these parts:

- REPRODUCE.md: ``verdict``
- results/reproduction/PAPER.md: ``compared``, a line for each table, quantity and variant; and a part for
  each of its scenarios, under the scenario's name
- docs/trust.md, of real machines alone: ``validation``, the errors by who measured
- docs/long_context.md, of the field alone: ``ladder``, the longest sequences by switches

The paper ``all`` has the parts that all committed results make: ``headlines`` of REPRODUCE.md and ``trust``
of README.md. `spbench reproduce bands` writes ``certainty`` of REPRODUCE.md, ``times`` of
results/reproduction/times.md and ``classes`` of docs/trust.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import write_whole
from spbench.bench.tools.papers.paper_findings import Line, PaperFindings, markdown
from spbench.bench.tools.papers.sources import ALL, FIELD, MEASURED
from spbench.bench.tools.papers.summary_page import headline_lines, paper_sections
from spbench.bench.tools.papers.validation import ladder_lines, trust_lines, validation_lines

SUMMARY_PAGE = Path("REPRODUCE.md")
FIRST_PAGE = Path("README.md")
TRUST_PAGE = Path("docs", "trust.md")
LENGTHS_PAGE = Path("docs", "long_context.md")
DETAILS_FOLDER = Path("results", "reproduction")
TIMES_PAGE = DETAILS_FOLDER / "times.md"

VERDICT, COMPARED = "verdict", "compared"
#: by paper, a page with a part of its own, the part's name, and what makes it of the paper's records
_FURTHER = {
    MEASURED: (TRUST_PAGE, "validation", validation_lines),
    FIELD: (LENGTHS_PAGE, "ladder", ladder_lines),
}
#: the parts that all committed results make
_OF_ALL = (
    (FIRST_PAGE, "trust", trust_lines),
    (SUMMARY_PAGE, "headlines", headline_lines),
)
_PART = re.compile(
    r"(?P<begin>^<!-- spbench reproduce (?P<paper>[\w-]+): (?P<name>[\w-]+) -->\n)"
    r"(?P<text>.*?)(?P<end>^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
_BEGIN = re.compile(r"^<!-- spbench reproduce ", re.MULTILINE)


def parts_of(paper: str, scenarios: Sequence[str]) -> dict[Path, Sequence[str]]:
    """The documents on a paper, below the working directory, with the names of their generated parts."""
    documents: dict[Path, Sequence[str]] = {
        SUMMARY_PAGE: [VERDICT],
        _details(paper): [COMPARED, *scenarios],
    }
    if paper in _FURTHER:
        page, name, _ = _FURTHER[paper]
        documents[page] = [name]
    return documents


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
    written = [write_whole(path, text) for path, text in rendered_documents(findings).items()]
    return [*written, *write_shared()]


def write_part(path: Path, paper: str, name: str, content: str) -> Path:
    """Write one part of a document anew; UserError if the document cannot be read or written, or has no such
    part."""
    text = _read(path)
    if not _has_part(text, paper, name):
        add = f"add <!-- spbench reproduce {paper}: {name} --> and <!-- end --> to it"
        raise UserError(f"{path} has no part for {name}: {add}")
    return write_whole(path, _replaced(text, paper, lambda part: content if part == name else None))


def write_shared() -> list[Path]:
    """Write the parts that all committed results make, where a page has them; returns the pages. UserError if
    a result cannot be read, or a page cannot be written."""
    there = [part for part in _OF_ALL if part[0].exists() and _has_part(_read(part[0]), ALL, part[1])]
    return [write_part(page, ALL, name, markdown(lines(DETAILS_FOLDER))) for page, name, lines in there]


def _has_part(text: str, paper: str, name: str) -> bool:
    return (paper, name) in [(part["paper"], part["name"]) for part in _PART.finditer(text)]


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
    _, further, further_lines = _FURTHER.get(findings.paper, (None, "", None))

    def content(name: str) -> str:
        if name == VERDICT:
            return paper_sections(findings, details)
        if name == COMPARED:
            return markdown(_titled(findings))
        if further_lines and name == further:
            return markdown(_once(further_lines(findings.records)))
        return findings.part(name)

    return _replaced(text, findings.paper, content)


def _once(lines: Sequence[Line]) -> list[Line]:
    """The lines with their first column blank where the line above has the same text there."""
    firsts = [next(iter(line.items())) for line in lines]
    above = [None, *firsts[:-1]]
    return [
        {**line, first[0]: "" if first == before else first[1]}
        for line, first, before in zip(lines, firsts, above, strict=True)
    ]


def _titled(findings: PaperFindings) -> list[Line]:
    """All that was compared, with a link from each scenario's title to its part, once for its lines."""
    lines: list[Line] = []
    for line in findings.verdict():
        scenario = line.pop("scenario")
        document = findings.documents.get(scenario)
        title = f"[{document.title}](#{scenario})" if document else "**all of the page**"
        lines.append({"table or figure": title, **line})
    return _once(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
