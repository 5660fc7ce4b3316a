"""What REPRODUCE.md says: the papers' headline claims beside ours, and a verdict on each paper and on each of
its tables and figures, a line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.paper_findings import (
    Line,
    PaperFindings,
    PaperVerdict,
    counts,
    markdown,
    verdict_on,
)
from spbench.bench.tools.papers.sources import papers, published_file
from spbench.bench.units import difference, error_percent, six_digits
from spbench.plots.series import grouped

HEADLINES_FILE = "headlines.csv"
#: parts of a cell's key, in its order
_OF_KEY = ("model", "method", "sizes", "batch", "length")
#: what quantities of memory end with
_MEMORY = ("_bytes", "_mb", "_gb", "_mib", "_gib")
#: what a title ends with: the figure or table
_FIGURE = re.compile(r"\(([^()]+)\)$")

# -- verdicts ------------------------------------------------------------------------------------------------


def paper_sections(findings: PaperFindings, details: str) -> str:
    """The sections on a paper, in Markdown: one for its own numbers, and one for each other paper whose
    numbers stand on its page, each with a verdict and a line for each table or figure.

    Args:
        details: the page that titles lead to, at their scenario's name.
    """
    by_source: dict[str, list[str]] = {}
    for scenario in findings.scenarios:
        document = findings.documents.get(scenario)
        by_source.setdefault(document.published_in if document else "", []).append(scenario)
    return "\n".join(
        _section(findings, source, names, details) for source, names in sorted(by_source.items())
    )


def _section(findings: PaperFindings, source: str, scenarios: Sequence[str], details: str) -> str:
    paper = papers()[findings.paper]
    verdict = verdict_on([record for record in findings.records if record.scenario in scenarios])
    title = source or (f"{paper.label}, {paper.source}" if "arXiv" in paper.source else paper.title)
    target = f"{details}#{scenarios[0]}" if source else details
    sentences = f"{counts(verdict).capitalize()}. {'' if source else paper.finding}".rstrip()
    lines, without = [], []
    for name in scenarios:
        of_scenario = list(_lines(name, findings, details))
        lines += of_scenario
        if not of_scenario:
            without.append(_link(name, findings, details, short=True))
    text = f"## [{title}]({target}): {verdict.word}\n\n{sentences}\n\n{markdown(lines)}"
    return text + (f"\nWithout published numbers: {', '.join(without)}.\n" if without else "")


def _lines(scenario: str, findings: PaperFindings, details: str) -> Iterator[Line]:
    """The line of a scenario that has numbers to judge: by kind of number its verdict, counts and errors."""
    document = findings.documents.get(scenario)
    records = [record for record in findings.records if record.scenario == scenario]
    verdicts = {kind: verdict_on(some) for kind, some in grouped(records, kind_of).items()}
    judged = {kind: verdict for kind, verdict in verdicts.items() if verdict.judged}
    if judged:
        yield {
            "table or figure": _link(scenario, findings, details),
            "reproduces": "; ".join(_reproduces(*one) for one in judged.items()),
            "why": " ".join(document.not_reproduced.split()) if document else "",
        }


def _reproduces(kind: str, verdict: PaperVerdict) -> str:
    """The verdict on a kind of number, how many are met, and the median and the worst error where there is one."""
    errors = verdict.formula_errors if kind == "bytes" else verdict.errors
    worst = map(error_percent, (median(errors), max(errors)) if errors else ())
    return ", ".join([f"{kind}: **{verdict.word}**", f"{verdict.met}/{verdict.judged}", *worst])


def _link(scenario: str, findings: PaperFindings, details: str, *, short: bool = False) -> str:
    """A scenario's title without the paper's name, as a link to its details; ``short``: the figure alone."""
    document = findings.documents.get(scenario)
    title = document.title.replace(f"({findings.paper.upper()}, ", "(") if document else scenario
    if short and (figure := _FIGURE.search(title)):
        title = figure[1]
    return f"[{title}]({details}#{scenario})"


def kind_of(record: Comparison) -> str:
    """What a published number is of: bytes sent, memory, time, a size that fits, or losses."""
    if record.role in ("formula", "curve"):
        return {"formula": "bytes", "curve": "losses"}[record.role]
    if record.is_time:
        return "time"
    return "memory" if record.quantity.endswith(_MEMORY) else "size"


# -- headline claims -----------------------------------------------------------------------------------------


def headline_lines(folder: Path) -> list[Line]:
    """A line for each claim of results/papers/headlines.csv: the published number and ours.

    Args:
        folder: the files of `spbench reproduce`.
    """
    lines = []
    for claim in published_file(HEADLINES_FILE).rows:
        published = float(claim["published"])
        ours = _OURS[claim["claim"]](_frame(folder / f"{claim['paper'].lower()}.csv"))
        lines.append(
            {
                "claim": f"{claim['paper']}: {claim['what']}",
                "published": f"{six_digits(round(published, 2))}{claim['unit']}",
                "ours": f"{six_digits(round(ours, 2))}{claim['unit']}",
                "error": difference(ours / published - 1, 0),
                "why": claim["why"],
            }
        )
    return lines


def _frame(path: Path) -> pd.DataFrame:
    """The lines of PAPER.csv, with what stands in the keys of their cells."""
    records = pd.read_csv(path, keep_default_na=False)
    keys = records["cell"].str.split("/", expand=True).reindex(columns=range(len(_OF_KEY)))
    records[[*_OF_KEY]] = keys
    records["reproduced"] = pd.to_numeric(records["reproduced"])
    records["tokens"] = pd.to_numeric(records["length"].str.removeprefix("L"), errors="coerce")
    records["ranks"] = records["sizes"].str.removeprefix("sp").str.removeprefix("tp")
    return records


def _number(records: pd.DataFrame, claim: str) -> float:
    return float(records.loc[records["table"] == claim, "reproduced"].iloc[0])


def _longest(records: pd.DataFrame, table: str, **fields: str) -> float:
    """The longest sequence of the cells of a table that have these fields and fit, in tokens."""
    wanted = records[(records["table"] == table) & (records["status_reproduced"] == "ok")]
    for name, value in fields.items():
        wanted = wanted[wanted[name] == value]
    return float(wanted["tokens"].max())


def _longer_by_lasp(records: pd.DataFrame) -> float:
    """The longest sequence of LASP over that of the other methods, as the first reading has them."""
    others = (
        _longest(records, "lasp-speed-left-product", model="tnl-1b", method=method)
        for method in ("ulysses", "megatron_sp")
    )
    return _longest(records, "lasp-speed", model="tnl-1b", method="lasp") / max(others)


def _dsp_over_others(records: pd.DataFrame) -> pd.Series:
    """DSP's number over each other method's, at the same sizes."""
    numbers = records.pivot_table(
        index=["model", "length", "ranks"], columns="method", values="reproduced", sort=False
    )
    return pd.Series(numbers.rdiv(numbers["dsp"], axis=0).drop(columns="dsp").stack())


def _dsp_speed(records: pd.DataFrame) -> pd.Series:
    return _dsp_over_others(records[records["table"] == "dsp-scaling"])


#: by claim, our number from the records of its paper
_OURS: Mapping[str, Callable[[pd.DataFrame], float]] = {
    "rsa-batch": lambda records: _number(records, "rsa-max-batch-base"),
    "rsa-length": lambda records: _number(records, "rsa-max-seqlen-base"),
    "lasp-longest": lambda records: _longest(records, "lasp-scalability", sizes="sp128") / 1024,
    "lasp-longer": _longer_by_lasp,
    "dsp-least": lambda records: _dsp_speed(records).min(),
    "dsp-most": lambda records: _dsp_speed(records).max(),
    "dsp-volume": lambda records: (
        100 * _dsp_over_others(records[records["table"].str.contains("-wire, .*virtual")]).max()
    ),
}
