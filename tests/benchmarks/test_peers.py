"""Our ring and Ulysses attentions beside yunchang's and ring-flash-attn's, on Gloo ranks of this machine:
pip install -e '.[test,peers]'
pytest tests/benchmarks/test_peers.py --benchmark-only -s

Prints, for each placement on 2 and 4 ranks, the CPU milliseconds of a forward and a backward pass summed over
ranks, and the wall milliseconds of the slowest rank, each the median of rounds in which all take turns;
"ours_of_its" is the median of our CPU time divided by that package's in the same round. "error" is the worst
relative error of an output or a gradient on any rank, in multiples of one device's error in float32: a peer
whose error is large is wrong as published, and its mended copy stands below it. With SPBENCH_PEERS=FILE the
table also goes to that CSV file. Times are reported, not judged; ours must be right.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from spbench.bench.commands.forms.as_table import drawn
from spbench.bench.commands.report import Table
from spbench.bench.engines.rank_pool import RankPool
from tests.benchmarks.contest import OURS, PLACEMENTS, Found, Shape, contest
from tests.benchmarks.peers import available

ROUNDS = 41
#: times the error of one device: the results of blocks are rounded once more when they are merged
WORST_ERROR = 3.0


@pytest.fixture(scope="module")
def contestants() -> Iterator[RankPool]:
    """Ranks of their own, since the peers need a module ``flash_attn`` that other tests must not find."""
    with RankPool(4) as ranks:
        yield ranks


def lines(placement: str, ranks: int, by_rank: list[dict[str, Found]]) -> list[dict[str, Any]]:
    """A line of the table for each package."""
    sums = {
        name: [sum(of) for of in zip(*(f[name].cpu_ms for f in by_rank), strict=True)] for name in by_rank[0]
    }
    return [
        {
            "placement": placement,
            "ranks": ranks,
            "package": name,
            "error": max(f[name].errors[x] / f[name].noise[x] for f in by_rank for x in f[name].errors),
            "cpu_ms": statistics.median(cpu_ms),
            "wall_ms": statistics.median(map(max, zip(*(f[name].wall_ms for f in by_rank), strict=True))),
            "ours_of_its": statistics.median(a / b for a, b in zip(sums[OURS], cpu_ms, strict=True)),
        }
        for name, cpu_ms in sums.items()
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_attention_beside_the_peers(
    benchmark: Any, contestants: RankPool, capsys: pytest.CaptureFixture[str], placement: str, ranks: int
) -> None:
    case = ({"sp": ranks}, contest, placement, Shape(), torch.float32, ROUNDS)
    by_rank = benchmark.pedantic(contestants.run, case, {"timeout_s": 500.0}, rounds=1)
    table = lines(placement, ranks, by_rank)
    benchmark.extra_info["lines"] = table
    shown = [{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in line.items()} for line in table]
    title = f"{placement} on {ranks} ranks; peers: {', '.join(available()) or 'none installed'}"
    with capsys.disabled():
        print("", drawn(Table(title, shown), terminal=False), sep="\n")
    if path := os.environ.get("SPBENCH_PEERS"):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(table).to_csv(target, index=False, mode="a", header=not target.exists())
    assert table[0]["package"] == OURS
    assert table[0]["error"] < WORST_ERROR, table[0]
