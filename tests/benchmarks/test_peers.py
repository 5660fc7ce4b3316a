"""Our ring, Ulysses and USP attentions beside those of the peers, on Gloo ranks of this machine:
pip install -e '.[test,peers]'
pytest tests/benchmarks/test_peers.py --benchmark-only -s

Prints, for each algorithm on 2 and 4 ranks in float32, and on 4 in bfloat16, the CPU milliseconds of a
forward and a backward pass summed over ranks, and the wall milliseconds of the slowest rank, each the median
of rounds in which all take turns; "ours_of_its" is the median of our CPU time divided by the other's in the
same round. "error" is the worst relative error of an output or a gradient on any rank, in multiples of one
device's error in that dtype. What is wrong is not timed; the rings that are wrong in float32 as published
stand there mended too (:mod:`tests.benchmarks.mended`). With SPBENCH_PEERS=FILE the table also goes to that
CSV file. Times are reported, not judged; ours must be right.
"""

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from spbench.bench.command_line.drawn_tables import markdown
from spbench.bench.command_line.output import Table
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.discovery import absent
from spbench.impls.registries import all_peers
from spbench.impls.strategies.nesting import nesting
from tests.benchmarks import mended
from tests.benchmarks.contest import WORST_ERROR, Entrant, Found, Shape, contest

ROUNDS = 7
#: ours, and the peers that are made for the same, by algorithm
ALGORITHMS = {
    **{
        placement: ("ring_attention", ["ring_flash_attention", "yunchang_ring", "torch_context_parallel"])
        for placement in ("contiguous", "zigzag", "striped")
    },
    "ulysses": ("ulysses", ["yunchang_ulysses", "deepspeed_ulysses"]),
    "usp": ("ulysses+ring_attention", ["yunchang_usp"]),
}
#: copies of the rings that are wrong in float32 as published
MENDED = {
    "ring_flash_attention": mended.MendedRingFlashAttention,
    "yunchang_ring": mended.MendedYunchangRing,
    "yunchang_usp": mended.MendedYunchangUSP,
}
MESHES = [({"sp": 2}, "2"), ({"sp": 4}, "4"), ({"sp": 2, "cp": 2}, "2 x 2")]


@pytest.fixture(scope="module")
def contestants() -> Iterator[RankPool]:
    """Ranks of their own, since the peers need a module ``flash_attn`` that other tests must not find."""
    with RankPool(4) as ranks:
        yield ranks


def entrants(algorithm: str, dtype: torch.dtype) -> Iterator[Entrant]:
    """Ours first, then the peers that are installed, as published and, in float32, mended."""
    ours, others = ALGORITHMS[algorithm]
    options = {"placement": algorithm} if algorithm in ("zigzag", "striped") else {}
    yield Entrant(ours, nesting(ours), options)
    for name in others:
        cls = all_peers()[name]
        if absent(cls.requires):
            continue
        if name == "torch_context_parallel":
            if algorithm != "striped":
                yield from (
                    Entrant(f"{name} ({rotate})", cls, {**options, "rotate": rotate})
                    for rotate in ("allgather", "alltoall")
                )
            continue
        yield Entrant(name, cls, options)
        if dtype is torch.float32 and name in MENDED:
            yield Entrant(f"{name} (mended)", MENDED[name], options)


def lines(algorithm: str, ranks: str, dtype: str, by_rank: list[dict[str, Found]]) -> list[dict[str, Any]]:
    """A line of the table for each entrant, ours first."""
    sums = {
        name: [sum(of) for of in zip(*(f[name].cpu_ms for f in by_rank), strict=True)] for name in by_rank[0]
    }
    ours = next(iter(sums.values()))
    table = []
    for name, cpu_ms in sums.items():
        line: dict[str, Any] = {"algorithm": algorithm, "ranks": ranks, "dtype": dtype, "strategy": name}
        line["error"] = max(f[name].error for f in by_rank)
        wall_ms = [max(of) for of in zip(*(f[name].wall_ms for f in by_rank), strict=True)]
        ratios = [a / b for a, b in zip(ours, cpu_ms, strict=bool(cpu_ms))]
        for column, values in (("cpu_ms", cpu_ms), ("wall_ms", wall_ms), ("ours_of_its", ratios)):
            line[column] = statistics.median(values) if values else None
        table.append(line)
    return table


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("mesh", "ranks"), MESHES, ids=[ranks for _, ranks in MESHES])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_attention_beside_the_peers(
    benchmark: Any,
    contestants: RankPool,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    mesh: dict[str, int],
    ranks: str,
    dtype: str,
) -> None:
    if (algorithm == "usp") != ("cp" in mesh):
        pytest.skip("USP is of two axes, and it alone")
    if dtype == "bf16" and ranks == "2":
        pytest.skip("bf16 is timed on 4 ranks")
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    chosen = list(entrants(algorithm, precision))
    case = (mesh, contest, chosen, Shape(), precision, ROUNDS)
    by_rank = benchmark.pedantic(contestants.run, case, {"timeout_s": 300.0}, rounds=1)
    table = lines(algorithm, ranks, dtype, by_rank)
    benchmark.extra_info["lines"] = table
    shown = [{k: f"{v:.3g}" if isinstance(v, float) else v for k, v in line.items()} for line in table]
    with capsys.disabled():
        print("", markdown(Table(f"{algorithm} on {ranks} ranks, {dtype}", shown)), sep="\n")
    if path := os.environ.get("SPBENCH_PEERS"):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(table).to_csv(target, index=False, mode="a", header=not target.exists())
    assert table[0]["error"] < WORST_ERROR, table[0]
