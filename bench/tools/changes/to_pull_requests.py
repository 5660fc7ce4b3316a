"""Exports that GitHub shows at a pull request: a comment, and annotations.

In the comment, worse differences come first, then missing, better and new ones; equal cells are counted. The
comment's first line is always the same, so that a workflow finds the comment to update by this line. The text
stays below GitHub's limit for a comment: lines that have no room are counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from spbench.bench.command_line.record_forms import shown_band
from spbench.bench.errors import UserError
from spbench.bench.measure import with_band
from spbench.bench.row import Row
from spbench.bench.tools.changes.export_command import Exported, ExportRequest
from spbench.bench.tools.changes.judgement import Suite
from spbench.bench.tools.changes.judgement_report import grouped, shown_difference, shown_number
from spbench.bench.tools.changes.metrics import STATUSES, Difference, Reading, readings
from spbench.bench.tools.changes.result_files import Claims
from spbench.bench.units import three_digits
from spbench.plots.series import grouped as by_value

MARK = "<!-- spbench -->"

#: the most characters of a comment on GitHub
LIMIT = 65_536

VERDICTS = {"worse": "❌ worse", "missing": "❌ missing", "better": "✅ better", "new": "🆕 new"}


@dataclass
class Listing:
    """A Markdown table whose last lines may be left out where there is no room.

    Attributes:
        title: the title of a folded table; "" for a table in full view.
        lines: the cells of each line, the most important line first.
        shown: the number of lines for which there is room.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    shown: int = 0

    def __str__(self) -> str:
        rows = [_line(self.header), "|" + " --- |" * len(self.header), *map(_line, self.lines[: self.shown])]
        if left := len(self.lines) - self.shown:
            rows += ["", f"{left} more lines had no room."]
        table = "\n".join(rows)
        if not self.title:
            return table
        return f"<details><summary>{self.title}</summary>\n\n{table}\n\n</details>"


def _to_markdown(request: ExportRequest) -> Exported:
    """One document for all suites.

    Raises:
        UserError: there are so many suites that their headings are too long without any table.
    """
    blocks: list[str | Listing] = [MARK, f"## spbench: {_headline(request.suites)}"]
    for suite in request.suites:
        blocks += _compared(suite) if suite.judgement else _alone(suite)
    if request.not_run:
        blocks.append(f"**Not run:** {', '.join(request.not_run)}.")
    return Exported(_fitting(blocks) + "\n")


export_markdown = _to_markdown
"""Markdown: the comment on a pull request, or the summary of a job."""


def _fitting(blocks: Sequence[str | Listing]) -> str:
    """The blocks as one text. Tables get as many lines as there is room for, folded tables after others."""
    listings = [block for block in blocks if isinstance(block, Listing)]
    room = LIMIT - 1 - len("\n\n".join(map(str, blocks)))
    for listing in sorted(listings, key=lambda listing: bool(listing.title)):
        for line in listing.lines:
            room -= len(_line(line)) + 1
            if room < 0:
                break
            listing.shown += 1
    text = "\n\n".join(map(str, blocks))
    if len(text) >= LIMIT:
        raise UserError(
            f"the headings of so many results are more than a comment's {LIMIT} characters; export fewer"
        )
    return text


def _headline(suites: Sequence[Suite]) -> str:
    judged = [suite.judgement for suite in suites if suite.judgement]
    if not judged:
        return "results"
    words = [judgement.word for judgement in judged]
    return next((word for word in ("worse", "not judged") if word in words), "not worse")


def _compared(suite: Suite) -> Iterator[str | Listing]:
    judgement = suite.judgement
    assert judgement
    assert suite.base
    yield f"### {suite.name}: {judgement.word}"
    head, base = suite.shown_origin, suite.base.shown_origin
    yield f"Head: {head}\nBase: {base}\n{judgement.counted('unchanged')}.".replace("\n", "  \n")
    failing = [difference for difference in judgement.differences if difference.fails]
    others = [difference for difference in judgement.differences if not difference.fails]
    if failing:
        yield _differences("", failing)
    if others:
        counts = Counter(difference.verdict for difference in others)
        yield _differences(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), others)
    if suite.meant and suite.meant.differences:
        assert suite.previous_base
        yield (
            f"**Meant:** this change brings another baseline of {suite.name} "
            f"(before: {suite.previous_base.shown_origin}). {suite.meant.counted('unchanged')}."
        )
        yield _differences("What the baseline's change moves", suite.meant.differences)
    if suite.claims:
        yield _claims(suite.claims, suite.base.claims or {})
    yield from judgement.notes


def _differences(title: str, differences: Sequence[Difference]) -> Listing:
    header = ("", "cell or claim", "quantity", "base", "head", "change", "what moved")
    lines = [
        (
            VERDICTS[difference.verdict],
            f"`{difference.where}`",
            difference.quantity,
            *shown_difference(difference),
            difference.why,
        )
        for difference in differences
    ]
    return Listing(title, header, lines)


def _claims(claims: Claims, before: Claims) -> Listing:
    """A folded table of the median errors against published numbers, before and now, by role."""
    errors = [_errors(each) for each in (before, claims)]
    lines = [
        (role, str(len(now)), _percent(errors[0].get(role)), _percent(now)) for role, now in errors[1].items()
    ]
    return Listing("Against published numbers", ("role", "numbers", "median error of base", "of head"), lines)


def _errors(claims: Claims) -> Mapping[str, list[float]]:
    compared = [row for row in claims.values() if row["relative_error"] is not None]
    by_role = by_value(compared, lambda row: row.get("role", ""))
    return {role: [abs(row["relative_error"]) for row in rows] for role, rows in by_role.items()}


def _percent(errors: Sequence[float] | None) -> str:
    return f"{median(errors):.2%}" if errors else ""


def _alone(suite: Suite) -> Iterator[str | Listing]:
    """The section on results that have no base: its cells, the worst status first, and its claims."""
    rows = sorted(suite.rows, key=lambda row: -STATUSES.index(row["status"]))
    values = {
        (row["key"], name): _shown(row, reading) for row in rows for name, reading in readings(row).items()
    }
    metrics = list(dict.fromkeys(name for _, name in values))
    counts = ", ".join(f"{count} {status}" for status, count in Counter(r["status"] for r in rows).items())
    yield f"### {suite.name}: {counts}"
    yield f"Commit: {suite.shown_origin}"
    lines = [
        (f"`{row['key']}`", row["status"], *(values.get((row["key"], name), "") for name in metrics))
        for row in rows
    ]
    yield Listing(f"{len(rows)} cells", ("cell", "status", *metrics), lines)
    if suite.claims:
        yield _claims(suite.claims, {})


def _shown(row: Row, reading: Reading) -> str:
    """A value as text: a step time with its interval, a rate with three digits, a whole number with all its
    digits, any other number with six."""
    if reading.metric.name == "step_time_s":
        return shown_band(with_band(row)["measurement"])
    return three_digits(reading.value) if reading.unit.endswith("/s") else shown_number(reading.value)


def _line(cells: Sequence[Any]) -> str:
    escaped = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


# -- annotations -----------------------------------------------------------------------------------------


def _to_github_annotations(request: ExportRequest) -> Exported:
    """An ``::error`` for each group of differences that fail, a ``::notice`` for each group of better or new
    ones, and a ``::notice`` for each suite with the counts. Differences are grouped as `spbench compare`
    groups them, because GitHub shows ten annotations of a kind a step. UserError if a suite has no base."""
    lines = [line for suite in request.suites for line in _annotations(suite)]
    return Exported("\n".join([*lines, ""]), [f"{name}: not run" for name in request.not_run])


export_github_annotations = _to_github_annotations
"""GitHub annotations: workflow commands, which a step of a job prints and GitHub shows at a pull request."""


def _annotations(suite: Suite) -> Iterator[str]:
    if (judgement := suite.judgement) is None:
        raise UserError(f"{suite.name}: annotations say what differs; give --base, such as results/baseline")
    for group in grouped(judgement.differences):
        kind = "error" if group.worst.fails else "notice"
        words = [f"{group.strategy} {group.values}".strip(), group.worst.why, group.where]
        text = "; ".join(filter(None, words))
        yield _command(kind, f"{suite.name}: {group.verdict}, {group.quantity}", text)
    yield _command("notice", suite.name, f"{judgement.word}: {judgement.counted('equal')}")


def _command(kind: str, title: str, text: str) -> str:
    """A workflow command; signs that would end the command or its title are escaped in GitHub's way."""
    for sign in "%\r\n":
        title, text = (each.replace(sign, f"%{ord(sign):02X}") for each in (title, text))
    for sign in ":,":
        title = title.replace(sign, f"%{ord(sign):02X}")
    return f"::{kind} title={title}::{text}"
