"""Exports of the gate's judgement: JUnit XML for test reports, a comment on a pull request, and annotations.

In the comment, worse differences come first, then missing, better and new ones; equal cells are counted. The
comment's first line is always the same, so that a workflow finds the comment to update by this line. The text
stays below GitHub's limit for a comment: lines that have no room are counted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from spbench.bench.command_line.record_forms import shown_band
from spbench.bench.errors import UserError
from spbench.bench.measure import with_band
from spbench.bench.row import Row
from spbench.bench.tools.changes.export_command import FORMS, Exported, ExportRequest, integral
from spbench.bench.tools.changes.judgement import Suite
from spbench.bench.tools.changes.judgement_report import grouped, shown_difference, shown_number
from spbench.bench.tools.changes.metrics import STATUSES, Difference, Reading, readings
from spbench.bench.tools.changes.result_files import Claims
from spbench.bench.units import three_digits
from spbench.plots.series import grouped as by_value

MARK = "<!-- spbench -->"

#: the most characters of a comment on GitHub
LIMIT = 65_536

#: the XML element that a status adds to a test case, with or without a base
ELEMENTS = {
    **dict.fromkeys(("failed", "timeout"), "error"),
    **dict.fromkeys(("numerics", "mismatch"), "failure"),
    "unsupported": "skipped",
}
#: characters that XML cannot contain, even escaped; and those that stand escaped in its attributes
_NO_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_IN_ATTRIBUTES = {'"': "&quot;", "\t": "&#09;", "\n": "&#10;", "\r": "&#13;"}


def export_junit(request: ExportRequest) -> Exported:
    """JUnit XML: a test case for each cell and each claim, for the test reports of Jenkins, GitLab and
    others. Each suite of results has two test suites: one of its cells, one of its claims.

    Failures are differences for which the gate fails (worse, missing) and wrong results (numerics, mismatch);
    errors are cells without a result (failed, timeout). Skipped are cells that cannot be run (unsupported),
    and, with a base, cases that are not judged: new cells, cells measured on another machine, suites that
    were not run. Metrics are properties of the suite, named CELL/METRIC, and lines in the output of their
    case, because Jenkins' schema (junit-10.xsd of its xUnit plug-in) allows no properties within a case.
    """
    suites = [
        tests for suite in request.suites for tests in (_tests_of_cells(suite), _tests_of_claims(suite))
    ]
    suites += [{"name": n, "cases": [_case(n, n, None, (), unjudged="not run")]} for n in request.not_run]

    def xml(text: str, further: Mapping[str, str] = _IN_ATTRIBUTES) -> str:
        return escape(_NO_CHARACTERS.sub("?", text), further)

    return Exported(FORMS.document("junit", suites=[suite for suite in suites if suite["cases"]], xml=xml))


def _tests_of_cells(suite: Suite) -> dict[str, Any]:
    differences = _by_place(suite)
    properties = {"head": suite.shown_origin} | ({"base": suite.base.shown_origin} if suite.base else {})
    cases = []
    for key in dict.fromkeys([*suite.cells, *(suite.base.cells if suite.base else ())]):
        row = suite.cells.get(key)
        read = readings(row) if row is not None else {}
        said = {name: f"{integral(number.value)} {number.unit}" for name, number in read.items()}
        properties |= {f"{key}/{name}": text for name, text in said.items()}
        case = _case(key, suite.name, row, differences.get(key, ()), unjudged=_not_judged(suite, key))
        if row is not None and (band := with_band(row)["measurement"]).get("band"):
            said["step time"] = f"{shown_band(band)} ({band['band']})"
        cases.append(case | {"said": {"status": _status(row), **said}})
    return {"name": suite.name, "properties": properties, "cases": cases}


def _tests_of_claims(suite: Suite) -> dict[str, Any]:
    differences, of_base = _by_place(suite), (suite.base.claims if suite.base else None) or {}
    names = dict.fromkeys(" ".join(filter(None, name[:2])) for name in [*(suite.claims or {}), *of_base])
    unjudged = suite.judgement.unjudged if suite.judgement else names
    cases = [
        _case(n, f"{suite.name}.claims", None, differences.get(n, ()), "not judged" if n in unjudged else "")
        for n in names
    ]
    return {"name": f"{suite.name} claims", "cases": cases}


def _by_place(suite: Suite) -> Mapping[str, Sequence[Difference]]:
    return by_value(suite.judgement.differences if suite.judgement else (), lambda each: each.where)


def _case(
    name: str, classname: str, row: Row | None, differences: Iterable[Difference], unjudged: str
) -> dict[str, Any]:
    """A test case with at most one element: an error, a failure or "skipped" by the row's status, or one
    failure that lists all differences for which the gate fails, or "skipped" for the reason ``unjudged``."""
    status = _status(row)
    wrong = ELEMENTS.get(status)
    worse = [_spoken(difference) for difference in differences if difference.fails]
    case = {"name": name, "classname": classname, "time": round((row and row.get("elapsed_s")) or 0.0, 3)}
    if wrong == "error" or (wrong and not worse):
        return case | {"tag": wrong, "type": status, "message": str((row and row.get("reason")) or status)}
    if worse:
        kind = worse[0].partition(":")[0]
        return case | {"tag": "failure", "type": kind, "message": worse[0], "text": "\n".join(worse)}
    return case | ({"tag": "skipped", "type": "not judged", "message": unjudged} if unjudged else {})


def _not_judged(suite: Suite, key: str) -> str:
    """Why the gate did not judge a cell in full; "" if the gate did, or if there is no base."""
    if not suite.base or not suite.judgement:
        return ""
    if key not in suite.base.cells:
        return "not judged: the cell is new"
    reasons = ["not judged in full", *suite.judgement.notes]
    return "; ".join(reasons) if key in suite.judgement.unjudged else ""


def _status(row: Row | None) -> str:
    return str(row["status"]) if row is not None else "missing"


def _spoken(difference: Difference) -> str:
    shown = shown_difference(difference)
    change = f" ({shown.change})" if shown.change else ""
    values = f"{shown.base or 'none'} -> {shown.new or 'none'}{change}"
    why = f"; {difference.why}" if difference.why else ""
    return f"{difference.verdict}: {difference.quantity} {values}{why}"


# -- the comment on a pull request -----------------------------------------------------------------------

VERDICTS = {"worse": "❌ worse", "missing": "❌ missing", "better": "✅ better", "new": "🆕 new"}


@dataclass
class Listing:
    """A Markdown table whose last lines may be left out where there is no room.

    Attributes:
        title: the title of a folded table; "" for a table in full view.
        lines: the texts of each line by column, the most important line first.
        shown: the number of lines for which there is room.
    """

    title: str
    lines: Sequence[Mapping[str, Any]]
    shown: int = 0

    @property
    def rows(self) -> list[str]:
        """The lines as Markdown, after two lines of heads."""
        heads = list(dict.fromkeys(name for line in self.lines for name in line))
        rows = [heads, *([line.get(name, "") for name in heads] for line in self.lines)]
        escaped = [[str(text).replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
        texts = [f"| {' | '.join(row)} |" for row in escaped]
        return [texts[0], "|" + " --- |" * len(heads), *texts[1:]]

    def __str__(self) -> str:
        left = len(self.lines) - self.shown
        more = ["", f"{left} more lines had no room."] if left else []
        table = "\n".join([*self.rows[: 2 + self.shown], *more])
        return f"<details><summary>{self.title}</summary>\n\n{table}\n\n</details>" if self.title else table


def export_markdown(request: ExportRequest) -> Exported:
    """Markdown: the comment on a pull request, or the summary of a job. One document for all suites. Tables
    get as many lines as there is room for, folded tables after others.

    Raises:
        UserError: there are so many suites that their headings are too long without any table.
    """
    words = [suite.judgement.word for suite in request.suites if suite.judgement]
    worst = next((word for word in ("worse", "not judged", "not worse") if word in words), "results")
    blocks: list[str | Listing] = [MARK, f"## spbench: {worst}"]
    for suite in request.suites:
        blocks += _compared(suite) if suite.judgement else _alone(suite)
    if request.not_run:
        blocks.append(f"**Not run:** {', '.join(request.not_run)}.")
    room = LIMIT - 1 - len("\n\n".join(map(str, blocks)))
    listings = [block for block in blocks if isinstance(block, Listing)]
    for listing in sorted(listings, key=lambda listing: bool(listing.title)):
        for row in listing.rows[2:]:
            room -= len(row) + 1
            if room < 0:
                break
            listing.shown += 1
    text = "\n\n".join(map(str, blocks))
    if len(text) >= LIMIT:
        what = f"the headings of so many results are more than a comment's {LIMIT} characters"
        raise UserError(f"{what}; export fewer")
    return Exported(text + "\n")


def _compared(suite: Suite) -> Iterator[str | Listing]:
    judgement, base = suite.judgement, suite.base
    assert judgement
    assert base
    yield f"### {suite.name}: {judgement.word}"
    counted = judgement.counted("unchanged")
    yield f"Head: {suite.shown_origin}  \nBase: {base.shown_origin}  \n{counted}."
    by_failing = by_value(judgement.differences, lambda difference: difference.fails)
    for fails, some in by_failing.items():
        counts = Counter(difference.verdict for difference in some)
        title = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        yield _differences("" if fails else title, some)
    if suite.meant and suite.meant.differences:
        assert suite.previous_base
        yield (
            f"**Meant:** this change brings another baseline of {suite.name} "
            f"(before: {suite.previous_base.shown_origin}). {suite.meant.counted('unchanged')}."
        )
        yield _differences("What the baseline's change moves", suite.meant.differences)
    yield from _claims(suite.claims or {}, base.claims or {})
    yield from judgement.notes


def _differences(title: str, differences: Sequence[Difference]) -> Listing:
    return Listing(title, FORMS.records("of a comment", differences, words=VERDICTS, shown=shown_difference))


def _claims(claims: Claims, before: Claims) -> Iterator[Listing]:
    """A folded table of the median errors against published numbers, before and now, by role, if any."""
    then, now = (
        by_value((r for r in of.values() if r["relative_error"] is not None), lambda r: r.get("role", ""))
        for of in (before, claims)
    )
    if lines := FORMS.records("role of a comment", now.items(), before=then, median=_median_error):
        yield Listing("Against published numbers", lines)


def _median_error(rows: Sequence[Mapping[str, Any]] | None) -> str:
    return f"{median(abs(row['relative_error']) for row in rows):.2%}" if rows else ""


def _alone(suite: Suite) -> Iterator[str | Listing]:
    """The section on results that have no base: its cells, the worst status first, and its claims."""
    rows = sorted(suite.rows, key=lambda row: -STATUSES.index(row["status"]))
    counts = ", ".join(f"{count} {status}" for status, count in Counter(r["status"] for r in rows).items())
    yield f"### {suite.name}: {counts}"
    yield f"Commit: {suite.shown_origin}"
    lines = [
        {"cell": f"`{row['key']}`", "status": row["status"]}
        | {name: _shown(row, reading) for name, reading in readings(row).items()}
        for row in rows
    ]
    yield Listing(f"{len(rows)} cells", lines)
    yield from _claims(suite.claims or {}, {})


def _shown(row: Row, reading: Reading) -> str:
    """A value as text: a step time with its interval, a rate with three digits, a whole number with all its
    digits, any other number with six."""
    if reading.metric.name == "step_time_s":
        return shown_band(with_band(row)["measurement"])
    return three_digits(reading.value) if reading.unit.endswith("/s") else shown_number(reading.value)


# -- annotations -----------------------------------------------------------------------------------------


def export_github_annotations(request: ExportRequest) -> Exported:
    """GitHub annotations: workflow commands, which a step of a job prints and GitHub shows at a pull request.
    Each group of differences that fail is an ``::error``, each group of better or new ones a ``::notice``,
    and so are the counts of each suite. Differences are grouped as `spbench compare` groups them, because
    GitHub shows ten annotations of a kind a step. UserError if a suite has no base."""
    lines = [line for suite in request.suites for line in _annotations(suite)]
    return Exported("\n".join([*lines, ""]), [f"{name}: not run" for name in request.not_run])


def _annotations(suite: Suite) -> Iterator[str]:
    if (judgement := suite.judgement) is None:
        raise UserError(f"{suite.name}: annotations say what differs; give --base, such as results/baseline")
    for group in grouped(judgement.differences):
        words = [f"{group['strategy']} {group['values']}".strip(), group["worst"].why, group["where"]]
        title = f"{suite.name}: {group['verdict']}, {group['quantity']}"
        yield _command("error" if group["worst"].fails else "notice", title, "; ".join(filter(None, words)))
    yield _command("notice", suite.name, f"{judgement.word}: {judgement.counted('equal')}")


def _command(kind: str, title: str, text: str) -> str:
    """A workflow command; signs that would end the command or its title are escaped in GitHub's way."""
    for sign in "%\r\n":
        title, text = (each.replace(sign, f"%{ord(sign):02X}") for each in (title, text))
    for sign in ":,":
        title = title.replace(sign, f"%{ord(sign):02X}")
    return f"::{kind} title={title}::{text}"
