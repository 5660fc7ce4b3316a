"""Whether cells of peers may be measured: no speed is shown of code whose gradients are not proven right.

Every sweep verifies the peers that its unfinished cells name, on up to four Gloo ranks of this machine: the
smallest part of the tiny presets of the cell's model, in the cell's precision and with the options of its
strategy. Those strategies that are not peers are verified by the tests of this project.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import VerifyRow, verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import Model, model_preset, models
from spbench.impls.strategies.nesting import nesting

#: ranks along an axis, at most: of one axis, and of each of several
MOST, MOST_OF_EACH = 4, 2


def reasons_against(cells: Iterable[Cell], pool: RankPool | None = None) -> dict[str, str]:
    """By key of the cells that may not be measured: why, in a line.

    A cell that its strategy refuses may be measured: it ends as unsupported.

    Args:
        pool: of :data:`MOST` ranks; None: started if there is something to verify.
    """
    reasons: dict[str, str] = {}
    verdicts: dict[str, str] = {}
    with ExitStack() as stack:
        for cell in cells:
            if not nesting(cell.strategy).requires or cell.sizes.world == 1 or _refused(cell):
                continue
            question = _question(cell)
            if question not in verdicts:
                pool = pool or stack.enter_context(RankPool(MOST))
                verdicts[question] = _reason_against(pool, cell)
            if verdicts[question]:
                reasons[cell.key] = verdicts[question]
    return reasons


def _refused(cell: Cell) -> bool:
    if cell.search is not None:  # for some sizes, perhaps, which the search finds out
        return False
    try:
        plan(cell)
    except Unsupported:
        return True
    return False


def _question(cell: Cell) -> str:
    """What the verdict on a cell follows from."""
    model = type(model_preset(*cell.model_arguments)).__qualname__
    return repr(
        (cell.strategy, cell.strategy_options, model, cell.model_config_json, cell.precision, _sizes(cell))
    )


def _sizes(cell: Cell) -> dict[str, int]:
    """Ranks along the axes of the strategy, as many as the cell has but for a limit."""
    along = {axis: cell.mesh_sizes[axis] for axis in nesting(cell.strategy).axes}
    several = sum(ranks > 1 for ranks in along.values()) > 1
    return {axis: min(ranks, MOST_OF_EACH if several else MOST) for axis, ranks in along.items()}


def _reason_against(pool: RankPool, cell: Cell) -> str:
    """Why the cell's strategy is not proven; "" if it is: at the most ranks at which it can run a preset."""
    rows: list[VerifyRow] = []
    sizes = _sizes(cell)
    while math.prod(sizes.values()) > 1 and not any(row.status != "unsupported" for row in rows):
        rows += [_verified(pool, cell, sizes, name, preset) for name, preset in _tiny(cell).items()]
        sizes = {axis: max(1, ranks - 1) for axis, ranks in sizes.items()}
    for row in rows:
        if row.status == "RED":
            where = f"{row.model} on {row.mesh} Gloo ranks in {row.dtype}"
            # of a traceback the last line
            why = row.verdict or row.reason.strip().splitlines()[-1]
            return f"not measured, as verification is red ({where}): {why}"
    if not any(row.status == "green" for row in rows):
        why = rows[-1].reason if rows else f"{cell.model} has no tiny preset"
        return f"not measured, as nothing could be verified: {why}"
    return ""


def _verified(pool: RankPool, cell: Cell, sizes: Mapping[str, int], name: str, preset: Model) -> VerifyRow:
    options: Mapping[str, Any] = cell.strategy_options
    case = Case(nesting(cell.strategy), preset, next(iter(preset.parts())), cell.precision, options=options)
    return verify_case(pool, case, sizes, model_name=name)


def _tiny(cell: Cell) -> dict[str, Model]:
    """The tiny presets of the class of a cell's model; of a config.json its own model, shrunk."""
    if cell.model_config_json is not None:
        return {cell.model: model_preset(cell.model, config=cell.model_config_json).shrunk()}
    cls = type(model_preset(cell.model))
    return {each: model for each, model in models().items() if type(model) is cls and "-tiny" in each}
