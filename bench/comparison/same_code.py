"""Whether results that are to be written down were all made by one state of the code that others can get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spbench.bench.errors import UserError
from spbench.bench.sweep.results import Row


def code_of(row: Row) -> str:
    """The commit of the code that made a row; it ends in "-dirty" if the checkout was changed, and is empty
    for code that is not in a checkout."""
    return (row.get("provenance") or {}).get("commit") or ""


def check_same_code(rows: Mapping[str, Sequence[Row]]) -> None:
    """Refuse rows of a changed checkout, and rows of several commits.

    Args:
        rows: by scenario.

    Raises:
        UserError: names the scenario and the mend.
    """
    first: dict[str, str] = {}
    for scenario, made in rows.items():
        for code in dict.fromkeys(map(code_of, made)):
            if code.endswith("-dirty"):
                raise UserError(
                    f"{scenario}: rows were made by code that is in no commit ({code}), so that nothing is "
                    "written; commit it, and run again with --fresh"
                )
            first.setdefault(code, scenario)
            if len(first) > 1:
                (other, where), *_ = first.items()
                raise UserError(
                    f"{scenario}: rows were made by commit {code or 'unknown'}, others (of {where}) by "
                    f"{other or 'unknown'}, so that nothing is written; run again with --fresh"
                )
