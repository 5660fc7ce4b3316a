"""The generated parts of REPRODUCE.md, results/reproduction/PAPER.md, README.md and pages of docs.

A part stands between lines ``<!-- spbench reproduce PAPER: NAME -->`` and ``<!-- end -->``; the rest of a
page stays as it is. A paper has these parts:

- REPRODUCE.md: ``verdict``
- results/reproduction/PAPER.md: ``compared``, a line for each table, quantity and variant; a part for each of
  its scenarios, under the scenario's name; of real machines also ``validation``, the errors by who measured
- docs/long_context.md, of the field alone: ``ladder``, the longest sequences by switches

The paper ``all`` has the parts that all committed results make: ``headlines`` of REPRODUCE.md and ``trust``
of README.md. `spbench reproduce bands` writes ``certainty`` of REPRODUCE.md, ``times`` of
results/reproduction/times.md and ``classes`` of docs/trust.md.

REPRODUCE.md has the papers' headline claims and ours, and a verdict on each paper and on each of its tables
and figures, a line each.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pandas import DataFrame, Series, to_numeric

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import read_text, write_whole
from spbench.bench.tools.papers import paper_findings
from spbench.bench.tools.papers.comparison import groups, lines_of, read_comparisons
from spbench.bench.tools.papers.sources import ALL, FIELD, MEASURED, papers, published_file
from spbench.bench.tools.papers.validation import ladder_lines, trust_lines, validation_lines
from spbench.bench.units import error_percent
from spbench.plots.series import grouped

SUMMARY_PAGE = Path("REPRODUCE.md")
FIRST_PAGE = Path("README.md")
TRUST_PAGE = Path("docs", "trust.md")
LENGTHS_PAGE = Path("docs", "long_context.md")
DETAILS_FOLDER = Path("results", "reproduction")
TIMES_PAGE = DETAILS_FOLDER / "times.md"

#: a function from a paper's findings to the text of a part
PartText = Callable[[paper_findings.PaperFindings], str]
#: by paper: a page with a further part, the part's name, and the function from records to its lines
_FURTHER = {
    MEASURED: (DETAILS_FOLDER / f"{MEASURED}.md", "validation", validation_lines),
    FIELD: (LENGTHS_PAGE, "ladder", ladder_lines),
}
_PART = re.compile(
    r"(?P<begin>^<!-- spbench reproduce (?P<paper>[\w-]+): (?P<name>[\w-]+) -->\n)"
    r"(?P<text>.*?)(?P<end>^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
_BEGIN = re.compile(r"^<!-- spbench reproduce ", re.MULTILINE)


def parts_of(paper: str, scenarios: Sequence[str]) -> dict[Path, dict[str, PartText]]:
    """The documents on a paper, by path below the working directory: for each generated part, by name, the
    function that makes its text from the paper's findings."""
    details: dict[str, PartText] = {"compared": _titled}
    details |= {name: partial(paper_findings.PaperFindings.part, name=name) for name in scenarios}
    parts: dict[Path, dict[str, PartText]] = {
        SUMMARY_PAGE: {"verdict": paper_sections},
        _details(paper): details,
    }
    if paper in _FURTHER:
        page, name, lines = _FURTHER[paper]
        parts.setdefault(page, {})[name] = lambda findings: paper_findings.markdown(
            _once(lines(findings.records))
        )
    return parts


def _details(paper: str) -> Path:
    return DETAILS_FOLDER / f"{paper}.md"


def check_documents(paper: str, scenarios: Sequence[str]) -> None:
    """Raises a UserError if a document lacks one of the paper's parts, has another part of that paper, has a
    part without an end, or cannot be read."""
    for path, names in parts_of(paper, scenarios).items():
        text = read_text(path)
        if len(_BEGIN.findall(text)) != len(_PART.findall(text)):
            what = "a part begins that does not end with <!-- end -->, or has no PAPER: NAME"
            raise UserError(f"{path}: {what}")
        for name in _names(text, paper):
            if name not in names:
                raise UserError(f"{path}: it can have no part {name!r} of {paper}{suggestion(name, names)}")
        _with_parts(path, paper, dict.fromkeys(names, ""))


def rendered_documents(findings: paper_findings.PaperFindings) -> dict[Path, str]:
    """By path, the text of each document with the parts of the findings' paper replaced; UserError if a
    document cannot be read, or lacks a part."""
    return {
        path: _with_parts(path, findings.paper, {name: text(findings) for name, text in parts.items()})
        for path, parts in parts_of(findings.paper, findings.scenarios).items()
    }


def write_documents(findings: paper_findings.PaperFindings) -> list[Path]:
    """Write the documents after all texts are made, each whole or not at all; returns the paths. UserError as
    in :func:`rendered_documents`, or if a file cannot be written; that file stays the same."""
    written = [write_whole(path, text) for path, text in rendered_documents(findings).items()]
    return [*written, *write_shared()]


def write_part(path: Path, paper: str, name: str, lines: Sequence[paper_findings.Line]) -> Path:
    """Replace one part of a document by a table of these lines; UserError if the document cannot be read or
    written, or has no such part."""
    return write_whole(path, _with_parts(path, paper, {name: paper_findings.markdown(lines)}))


def write_shared() -> list[Path]:
    """Replace the parts that come from all committed results, in pages that have such parts; returns the
    pages. UserError if a result cannot be read, or a page cannot be written."""
    parts = ((FIRST_PAGE, "trust", trust_lines), (SUMMARY_PAGE, "headlines", headline_lines))
    return [
        write_part(page, ALL, name, lines(DETAILS_FOLDER))
        for page, name, lines in parts
        if page.exists() and name in _names(read_text(page), ALL)
    ]


def _names(text: str, paper: str) -> list[str]:
    """The names of a paper's parts in a document."""
    return [part["name"] for part in _PART.finditer(text) if part["paper"] == paper]


def _with_parts(path: Path, paper: str, texts: Mapping[str, str]) -> str:
    """The text of a document in which these parts of a paper, by name, are replaced; UserError if it cannot
    be read or lacks a part."""
    document = read_text(path)
    if missing := [name for name in texts if name not in _names(document, paper)]:
        add = f"add <!-- spbench reproduce {paper}: {missing[0]} --> and <!-- end --> to it"
        raise UserError(f"{path} has no part for {', '.join(missing)}: {add}")

    def part(match: re.Match[str]) -> str:
        new = texts.get(match["name"]) if match["paper"] == paper else None
        return match[0] if new is None else f"{match['begin']}{new}{match['end']}"

    return _PART.sub(part, document)


def _once(lines: Sequence[paper_findings.Line]) -> list[paper_findings.Line]:
    """The lines, with a blank first column if the line above has the same text in that column."""
    firsts = [next(iter(line.items())) for line in lines]
    same = [above == own for above, own in pairwise([None, *firsts])]
    return [{**line, **({own[0]: ""} if s else {})} for line, own, s in zip(lines, firsts, same, strict=True)]


def _titled(findings: paper_findings.PaperFindings) -> str:
    """The errors of all tables and claims, in Markdown; a scenario's first line has its title, a link."""
    lines: list[paper_findings.Line] = []
    for line in findings.verdict():
        scenario = line.pop("scenario")
        document = findings.documents.get(scenario)
        title = f"[{document.title}](#{scenario})" if document else "**all of the page**"
        lines.append({"table or figure": title, **line})
    return paper_findings.markdown(_once(lines))


HEADLINES_FILE = "headlines.csv"
#: parts of a cell's key, in its order
_OF_KEY = ("model", "method", "sizes", "batch", "length")
#: endings of names of memory quantities
_MEMORY = ("_bytes", "_mb", "_gb", "_mib", "_gib")
#: the figure or table in parentheses at the end of a title
_FIGURE = re.compile(r"\(([^()]+)\)$")

# -- verdicts ------------------------------------------------------------------------------------------------


def paper_sections(findings: paper_findings.PaperFindings) -> str:
    """The sections on a paper, in Markdown: one for its own numbers, and one for each other paper whose
    numbers are on its page, each with a verdict and a line for each table or figure. Titles link to the page
    of details, at their scenario's name."""
    documents = findings.documents
    by_source = grouped(
        findings.scenarios, lambda name: documents[name].published_in if name in documents else ""
    )
    return "\n".join(_section(findings, source, names) for source, names in sorted(by_source.items()))


def _section(findings: paper_findings.PaperFindings, source: str, scenarios: Sequence[str]) -> str:
    paper = papers()[findings.paper]
    verdict = paper_findings.verdict_on(findings.of(*scenarios))
    title = source or (f"{paper.label}, {paper.source}" if "arXiv" in paper.source else paper.title)
    target = f"{_details(findings.paper).as_posix()}" + (f"#{scenarios[0]}" if source else "")
    sentences = f"{paper_findings.counts(verdict)}. {'' if source else paper.finding}".rstrip()
    of_scenarios = {name: [*_lines(name, findings)] for name in scenarios}
    without = [_link(name, findings, short=True) for name, own in of_scenarios.items() if not own]
    lines = [*chain.from_iterable(of_scenarios.values())]
    text = f"## [{title}]({target}): {verdict.word}\n\n{sentences}\n\n{paper_findings.markdown(lines)}"
    return text + (f"\nNot compared with the paper: {', '.join(without)}.\n" if without else "")


def _lines(scenario: str, findings: paper_findings.PaperFindings) -> Iterator[paper_findings.Line]:
    """The line of a scenario, if it has judged numbers: verdict, counts and errors of each kind of number."""
    document = findings.documents.get(scenario)
    records = findings.of(scenario)
    records = records.assign(kind=[kind_of(record) for record in lines_of(records)])
    verdicts = {kind: paper_findings.verdict_on(some) for kind, some in groups(records, "kind")}
    judged = {kind: verdict for kind, verdict in verdicts.items() if verdict.judged}
    if judged:
        yield {
            "table or figure": _link(scenario, findings),
            "reproduces": "; ".join(_reproduces(*one) for one in judged.items()),
            "why": " ".join(document.not_reproduced.split()) if document else "",
        }


def _reproduces(kind: str, verdict: paper_findings.PaperVerdict) -> str:
    """In words: a kind of number, its verdict, how many are met, and the median and worst error, if any."""
    errors = verdict.formula_errors if kind == "bytes" else verdict.errors
    worst = map(error_percent, (median(errors), max(errors)) if errors else ())
    return ", ".join([f"{kind}: **{verdict.word}**", f"{verdict.met}/{verdict.judged}", *worst])


def _link(scenario: str, findings: paper_findings.PaperFindings, *, short: bool = False) -> str:
    """A scenario's title without the paper's name, as a link to its details; ``short``: only its figure."""
    document = findings.documents.get(scenario)
    title = document.title.replace(f"({findings.paper.upper()}, ", "(") if document else scenario
    if short and (figure := _FIGURE.search(title)):
        title = figure[1]
    return f"[{title}]({_details(findings.paper).as_posix()}#{scenario})"


def kind_of(record: Any) -> str:
    """The kind of a published number: bytes (that are sent), memory, time, size (that fits) or losses."""
    if record.role in ("formula", "curve"):
        return {"formula": "bytes", "curve": "losses"}[record.role]
    if record.is_time:
        return "time"
    return "memory" if record.quantity.endswith(_MEMORY) else "size"


# -- headline claims -----------------------------------------------------------------------------------------


def headline_lines(folder: Path) -> list[paper_findings.Line]:
    """A line for each claim of results/papers/headlines.csv: the published number and ours.

    Args:
        folder: the folder of the files of `spbench reproduce`.
    """
    lines = []
    for claim in published_file(HEADLINES_FILE).rows:
        ours = _OURS[claim["claim"]](_frame(folder / f"{claim['paper'].lower()}.csv"))
        lines.append(paper_findings.TABLES.record("headline", claim, ours=ours))
    return lines


def _frame(path: Path) -> DataFrame:
    """The lines of PAPER.csv, with further columns from the parts of the cells' keys."""
    records = read_comparisons(path)
    records[[*_OF_KEY]] = records["cell"].str.split("/", expand=True).reindex(columns=range(len(_OF_KEY)))
    records["tokens"] = to_numeric(records["length"].str.removeprefix("L"), errors="coerce")
    records["ranks"] = records["sizes"].str.removeprefix("sp").str.removeprefix("tp")
    return records


def _number(records: DataFrame, claim: str) -> float:
    return float(records.loc[records["table"] == claim, "reproduced"].iloc[0])


def _longest(records: DataFrame, table: str, query: str) -> float:
    """The longest sequence, in tokens, of a table's cells that a pandas query selects and that fit."""
    wanted = records[(records["table"] == table) & (records["status_reproduced"] == "ok")]
    return float(wanted.query(query)["tokens"].max())


def _dsp_over_others(records: DataFrame, tables: str) -> Series:
    """DSP's number over each other method's at the same sizes, in tables whose names match a pattern."""
    numbers = records[records["table"].str.match(tables)].pivot_table(
        index=["model", "length", "ranks"], columns="method", values="reproduced", sort=False
    )
    return Series(numbers.rdiv(numbers["dsp"], axis=0).drop(columns="dsp").stack())


#: by claim, our number from the records of its paper
_OURS: Mapping[str, Callable[[DataFrame], float]] = {
    "rsa-batch": lambda records: _number(records, "rsa-max-batch-base"),
    "rsa-length": lambda records: _number(records, "rsa-max-seqlen-base"),
    "lasp-longest": lambda records: _longest(records, "lasp-scalability", "sizes == 'sp128'") / 1024,
    # over the longest of the other methods, by the first reading of the paper
    "lasp-longer": lambda records: (
        _longest(records, "lasp-speed", "model == 'tnl-1b' and method == 'lasp'")
        / _longest(records, "lasp-speed-left-product", "model == 'tnl-1b' and method != 'lasp'")
    ),
    "dsp-least": lambda records: _dsp_over_others(records, "dsp-scaling$").min(),
    "dsp-most": lambda records: _dsp_over_others(records, "dsp-scaling$").max(),
    "dsp-volume": lambda records: 100 * _dsp_over_others(records, ".*-wire, .*virtual").max(),
}
