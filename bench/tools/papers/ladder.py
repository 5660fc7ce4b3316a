"""The table of ALST's ladder: the longest sequence of each rung, published and ours, and what the switch that
it adds costs in time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from spbench.bench.tools.papers.paper_findings import Line, Record, label_of, table_of

#: names of ratios, as the scenario gives them: the machine and the rungs as the table has them, and the step
_PRICE = re.compile(r"(?P<machine>.+), (?P<rung>[^,]+) over (?P<base>[^,]+), (?P<step>[^,]+)")
_TABLE = "alst"


def ladder_lines(records: Sequence[Record]) -> list[Line]:
    """A line for each rung, in the order of the published table; no price where no step was timed with and
    without a switch.

    Args:
        records: of `spbench reproduce field`.
    """
    prices: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if (price := _PRICE.fullmatch(table_of(record))) and record["reproduced"] is not None:
            of = prices[f"{price['machine']}, {price['rung']}"]
            of[price["base"]].append(f"{record['reproduced'] - 1:+.1%} ({price['step']})")
    lines = []
    for record in records:
        if table_of(record) == _TABLE:
            machine, _, rung = label_of(record).rpartition(", ")
            paid = prices[label_of(record)].items()
            lines.append(
                {
                    "on": machine.replace("gpus ", ""),
                    "switches": rung,
                    "longest, published": _length(record["published"]),
                    "ours": _length(record["reproduced"]),
                    "step": "; ".join(f"{', '.join(steps)} over {base}" for base, steps in paid),
                }
            )
    return lines


def _length(tokens: float | None) -> str:
    return "none" if tokens is None else f"{round(tokens):,}"
