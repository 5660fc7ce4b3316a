"""The simulated timeline against real ranks of this machine:
pytest tests/benchmarks/test_timeline_order.py --benchmark-only -s

Prints each cell's measured and simulated step time, and how well their order agrees; with
SPBENCH_TIMELINE_ORDER=FILE the table also goes to that CSV file. Times are reported, not judged; the order
must not be one by chance. Run it on a machine that does nothing else: the threads of a rank wait for each
other in every operator, so that one more busy process can slow a step tenfold, and in another cell than in
the rates. It takes some minutes.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.commands.forms.as_table import drawn
from spbench.bench.commands.output import Table
from tests.benchmarks.timeline_order import agreement, as_frame, cells, measure_order, rates

#: Spearman's correlation of 15 cells that an order by chance exceeds once in 200 runs
BY_CHANCE = 0.65


def test_order_of_strategies_and_sizes(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = list(cells())
    rows, clusters = benchmark.pedantic(measure_order, (chosen,), rounds=1)
    found = agreement(rows)
    tables = [
        Table(
            "Rates of a rank, by ranks at once",
            [{"ranks": n, **{k: v and f"{v:.3g}" for k, v in rates(c).items()}} for n, c in clusters.items()],
        ),
        Table(
            "Step times in seconds, measured (median, least, most of the samples) and simulated",
            [{k: f"{v:.4f}" if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows],
        ),
    ]
    with capsys.disabled():
        print("", *(drawn(table, terminal=False) for table in tables), found, sep="\n")
    benchmark.extra_info.update(asdict(found))
    if path := os.environ.get("SPBENCH_TIMELINE_ORDER"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        as_frame(rows, clusters).to_csv(path, index=False)
    assert len(rows) == len(chosen)
    assert found.rank_correlation > BY_CHANCE, found
