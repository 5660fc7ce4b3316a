"""Our ring and Ulysses attentions beside yunchang's and ring-flash-attn's, on Gloo ranks of this machine:
pip install -e '.[test,peers]'
pytest tests/benchmarks/test_peers.py --benchmark-only -s

Prints, for 2 and 4 ranks, the CPU milliseconds of a forward and a backward pass summed over ranks, and the
wall milliseconds of the slowest rank, each the median of rounds in which all take turns; "of best" is ours
divided by the fastest peer's CPU time, right or wrong. "error" is the worst relative error of an output or a
gradient on any rank, in multiples of one device's error in float32. With SPBENCH_PEERS=FILE the table also
goes to that CSV file. Times are reported, not judged; ours must be right.
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
from tests.benchmarks.contest import Contender, Found, Shape, contest
from tests.benchmarks.peers import available

ROUNDS = 21
#: times the error of one device: the results of blocks are rounded once more when they are merged
WORST_ERROR = 3.0


@pytest.fixture
def contestants() -> Iterator[RankPool]:
    """Ranks of their own, since the peers need a module ``flash_attn`` that other tests must not find."""
    with RankPool(4) as ranks:
        yield ranks


def lines(ranks: int, by_rank: list[dict[Contender, Found]]) -> list[dict[str, Any]]:
    """A line of the table for each contender, by algorithm."""
    table: list[dict[str, Any]] = []
    for contender in by_rank[0]:
        found = [of[contender] for of in by_rank]
        table.append(
            {
                "placement": contender.placement,
                "ranks": ranks,
                "package": contender.package,
                "cpu_ms": statistics.median(map(sum, zip(*(f.cpu_ms for f in found), strict=True))),
                "wall_ms": statistics.median(map(max, zip(*(f.wall_ms for f in found), strict=True))),
                "error": max(f.errors[name] / f.noise[name] for f in found for name in f.errors),
            }
        )
    for placement in {line["placement"] for line in table}:
        own, *others = (line for line in table if line["placement"] == placement)
        best = min((line["cpu_ms"] for line in others), default=None)
        own["of_best"] = best and own["cpu_ms"] / best
        for line in others:
            line["of_best"] = None
    return sorted(table, key=lambda line: [*by_rank[0]].index(Contender(line["placement"], "spbench")))


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_beside_the_peers(
    benchmark: Any, contestants: RankPool, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    case = ({"sp": ranks}, contest, Shape(), torch.float32, ROUNDS)
    by_rank = benchmark.pedantic(contestants.run, case, {"timeout_s": 500.0}, rounds=1)
    table = lines(ranks, by_rank)
    benchmark.extra_info["lines"] = table
    shown = [{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in line.items()} for line in table]
    title = f"Forward and backward on {ranks} ranks; peers: {', '.join(available()) or 'none installed'}"
    with capsys.disabled():
        print("", drawn(Table(title, shown), terminal=False), sep="\n")
    if path := os.environ.get("SPBENCH_PEERS"):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(table).to_csv(target, index=False, mode="a", header=not target.exists())
    for line in table:
        if line["package"] == "spbench":
            assert line["error"] < WORST_ERROR, line
