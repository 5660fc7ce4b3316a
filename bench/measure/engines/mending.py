"""Which options of a cell's model mend its refusal: all at once, where each alone would show the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from spbench.bench.cell import Cell
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Unsupported

Checked = TypeVar("Checked")


def with_mends(check: Callable[[Cell], Checked], cell: Cell) -> Checked:
    """What a check of a cell returns.

    Raises:
        Unsupported: it refuses the cell; where options of :meth:`Model.mending` mend that, with what each of
            them mends and how it is set.
    """
    try:
        return check(cell)
    except Unsupported as refusal:
        changes = model_preset(*cell.model_arguments).mending(cell.shape[1])

        def refused(*left_out: str) -> str:
            options = cell.model_options | {k: v for k, v in changes.items() if k not in left_out}
            try:
                check(cell.model_copy(update={"model_options": options}))
            except Unsupported as error:
                return error.reason
            return ""

        if not changes or refused():
            raise
        needed = {name: reason for name in changes if (reason := refused(name))}
        setting = ",".join(f"model_options.{name}={changes[name]}" for name in needed)
        reasons = "; ".join(dict.fromkeys(needed.values()))
        lone = len(needed) == 1 and not any(name in refusal.mend for name in needed)
        other = f", or {refusal.mend}" if lone else ""
        raise Unsupported(reasons, f"--set {setting} mends that{other}") from None
