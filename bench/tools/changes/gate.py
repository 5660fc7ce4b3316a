"""What the gate refuses to judge: results of other code than that of the checkout whose baseline it has."""

from __future__ import annotations

from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.measured_code import code_digest, is_baseline, refuse_unmeasured_checkout
from spbench.bench.tools.changes.result_files import Results


def check_gate(base: Results, new: Results) -> None:
    """Refuse a verdict on rows of other code, where the base is a committed baseline of the checkout of
    spbench around the working folder. Rows that do not say which code made them are let pass.

    Raises:
        UserError: another tree than the checkout is imported, or rows name another code.
    """
    if not is_baseline(base.path, Path.cwd()):
        return
    refuse_unmeasured_checkout(Path.cwd(), "the gate")
    digests = [(row.get("digest") or {}).get("code") for row in new.cells.values()]
    if others := sum(digest not in (None, code_digest()) for digest in digests):
        raise UserError(
            f"{new.path}: {others} of {len(digests)} rows were made by other code than this checkout has "
            "now; run the scenario again, so that the gate judges this code"
        )
