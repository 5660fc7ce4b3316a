"""Whether results that are to be written down were all made by one state of the code that others can get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spbench.bench.errors import UserError
from spbench.bench.sweep.results import Row


def check_same_code(rows: Mapping[str, Sequence[Row]]) -> None:
    """Refuse rows of a changed checkout, and rows of several commits: readers of the numbers must be able to
    get the code that made them all.

    Args:
        rows: by scenario.

    Raises:
        UserError: names the scenario and the mend.
    """
    first: tuple[str, str] | None = None
    for scenario, made in rows.items():
        for commit in map(commit_of, made):
            if commit.endswith("-dirty"):
                raise UserError(
                    f"{scenario}: rows were made by code that is in no commit ({commit}), so that nothing is "
                    "written; commit it, and run again with --fresh"
                )
            first = first or (scenario, commit)
            if commit != first[1]:
                raise UserError(
                    f"{scenario}: rows were made by commit {commit or 'unknown'}, those of {first[0]} by "
                    f"{first[1] or 'unknown'}, so that nothing is written; run again with --fresh"
                )


def commit_of(row: Row) -> str:
    """The commit of the code that made a row; it ends in "-dirty" if the checkout was changed, and is empty
    for code that is not in a checkout."""
    return (row.get("provenance") or {}).get("commit") or ""
