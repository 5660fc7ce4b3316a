"""GitHub annotations: workflow commands, which a step of a job prints and GitHub shows at a pull request.

An ``::error`` for each group of what closes the gate, a ``::notice`` for each of what is better or new, as
`spbench compare` groups them: GitHub shows ten of a kind a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.export_command import Exported, ExportRequest, Suite
from spbench.bench.tools.changes.judgement_report import grouped


def export(request: ExportRequest) -> Exported:
    """A line for each group of differences, and one for each suite on how many there are.

    Raises:
        UserError: there is nothing to compare with.
    """
    lines = [line for suite in request.suites for line in _lines(suite)]
    return Exported("\n".join([*lines, ""]), [f"{name}: not run" for name in request.not_run])


def _lines(suite: Suite) -> Iterator[str]:
    if (judgement := suite.judgement) is None:
        raise UserError(f"{suite.name}: annotations say what differs; give --base, such as results/baseline")
    for group in grouped(judgement.differences):
        kind = "error" if group.worst.fails else "notice"
        words = [f"{group.strategy} {group.values}".strip(), group.worst.why, group.where]
        text = "; ".join(filter(None, words))
        yield _command(kind, f"{suite.name}: {group.verdict}, {group.quantity}", text)
    yield _command("notice", suite.name, f"{judgement.word}: {judgement.counted('equal')}")


def _command(kind: str, title: str, text: str) -> str:
    """A workflow command; what would end it or its title is written as GitHub's own toolkit writes it."""
    for sign in "%\r\n":
        title, text = (each.replace(sign, f"%{ord(sign):02X}") for each in (title, text))
    for sign in ":,":
        title = title.replace(sign, f"%{ord(sign):02X}")
    return f"::{kind} title={title}::{text}"
