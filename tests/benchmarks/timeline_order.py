"""The simulated timeline against real ranks: is what it calls slower also slower here?

Cells run on Gloo ranks of this machine, and are simulated on the cluster `local` with rates that are measured
in the same run, on as many ranks. No cell's own time is used in its simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import pandas as pd

from spbench.bench.calibration.measured_cluster import measured_cluster
from spbench.bench.cell import Cell, Sizes, Timing
from spbench.bench.clusters.cluster import Cluster
from spbench.bench.engines.distributed import DistributedEngine
from spbench.bench.engines.virtual import trace_classes
from spbench.bench.provenance import provenance
from spbench.impls.models.bert import BertModel
from spbench.impls.registries import strategy_class

#: large enough that a step takes a few times as long as the system's noise, small enough for seconds
_MODEL = {"hidden": 256, "heads": 4, **BertModel.plain_options}
_SHAPES = [(4, 256), (16, 128), (2, 1024)]
_STRATEGIES = ("single", "tensor_parallel", "ring_self_attention")


def cells(worlds: Sequence[int] = (2, 4)) -> Iterator[Cell]:
    """One rank, and both strategies on each number of ranks, at each shape.

    Operators are the plain ones: a trace counts a fused one as a GPU's single kernel, which a CPU has not.
    """
    for batch, seq_len in _SHAPES:
        for strategy in _STRATEGIES:
            cls = strategy_class(strategy)
            for n in worlds if cls.axes else (1,):
                yield Cell(
                    model="bert-mini",
                    strategy=strategy,
                    sizes=Sizes(**cls.sizes_for(n)),
                    batch=batch,
                    seq_len=seq_len,
                    engine="distributed",
                    model_options=_MODEL,
                    timing=Timing(warmup=2, samples=9),
                )


@dataclass(frozen=True)
class Compared:
    """A cell's times in seconds; ``relative_error`` is simulated / measured - 1."""

    strategy: str
    ranks: int
    batch: int
    seq_len: int
    measured_s: float
    measured_least_s: float
    measured_most_s: float
    simulated_s: float
    relative_error: float
    simulated_compute_s: float
    simulated_overhead_s: float
    simulated_communication_s: float


def simulated(cell: Cell, cluster: Cluster) -> dict[str, float]:
    """The step time of a cell, and what it is made of."""
    timeline = trace_classes(cell, events=True).simulator(cluster)()
    return {"step_time_s": timeline.step_time_s, **timeline.breakdown}


def compared(cell: Cell, samples: Sequence[float], found: dict[str, float]) -> Compared:
    """Set a cell's simulated step beside the samples of its measured one."""
    batch, seq_len = cell.shape
    measured = float(pd.Series(samples).median())
    return Compared(
        strategy=cell.strategy,
        ranks=cell.sizes.world,
        batch=batch,
        seq_len=seq_len,
        measured_s=measured,
        measured_least_s=min(samples),
        measured_most_s=max(samples),
        simulated_s=found["step_time_s"],
        relative_error=found["step_time_s"] / measured - 1,
        simulated_compute_s=found["compute_s"],
        simulated_overhead_s=found["overhead_s"],
        simulated_communication_s=found["exposed_communication_s"] + found["bubble_s"],
    )


def measure_order(chosen: Sequence[Cell]) -> tuple[list[Compared], dict[int, Cluster]]:
    """Measure and simulate cells; also returns the rates for each number of ranks."""
    clusters = {n: measured_cluster(n) for n in sorted({cell.sizes.world for cell in chosen})}
    rows = []
    for cell in chosen:
        found = simulated(cell, clusters[cell.sizes.world])
        rows.append(compared(cell, DistributedEngine().measure(cell).step_time_samples_s, found))
    return rows, clusters


@dataclass(frozen=True)
class Agreement:
    """How well the simulated order and times are the measured ones.

    Attributes:
        rank_correlation: Spearman's, over all cells.
        pairs: of cells of one shape; pairs_alike: those of them that both put in the same order.
        clear_pairs: those whose measured samples do not overlap; clear_pairs_alike: likewise.
        median_error, worst_error: of the times, without sign.
    """

    rank_correlation: float
    pairs: int
    pairs_alike: int
    clear_pairs: int
    clear_pairs_alike: int
    median_error: float
    worst_error: float

    def __str__(self) -> str:
        return (
            f"rank correlation {self.rank_correlation:.2f}; of pairs of one shape {self.pairs_alike} of "
            f"{self.pairs} in the measured order, {self.clear_pairs_alike} of {self.clear_pairs} where "
            f"samples do not overlap; error: median {self.median_error:.0%}, worst {self.worst_error:.0%}"
        )


def agreement(rows: Sequence[Compared]) -> Agreement:
    """Compare the order and the times."""
    frame = pd.DataFrame([asdict(row) for row in rows])
    # Spearman's is Pearson's of the ranks; pandas would want scipy to do it in one
    correlation = frame["measured_s"].rank().corr(frame["simulated_s"].rank())
    pairs = [(a, b) for a, b in combinations(rows, 2) if (a.batch, a.seq_len) == (b.batch, b.seq_len)]
    alike = [(a.measured_s < b.measured_s) == (a.simulated_s < b.simulated_s) for a, b in pairs]
    clear = [
        a.measured_most_s < b.measured_least_s or b.measured_most_s < a.measured_least_s for a, b in pairs
    ]
    errors = frame["relative_error"].abs()
    return Agreement(
        rank_correlation=float(correlation),
        pairs=len(pairs),
        pairs_alike=sum(alike),
        clear_pairs=sum(clear),
        clear_pairs_alike=sum(both for both, c in zip(alike, clear, strict=True) if c),
        median_error=float(errors.median()),
        worst_error=float(errors.max()),
    )


def as_frame(rows: Sequence[Compared], clusters: dict[int, Cluster]) -> pd.DataFrame:
    """A table of the cells with the rates they were simulated with, and where they come from."""
    made_by = {name: value for name, value in provenance().items() if name != "machine"}
    return pd.DataFrame([{**asdict(row), **rates(clusters[row.ranks]), **made_by} for row in rows]).round(9)


def rates(cluster: Cluster) -> dict[str, float | None]:
    """The measured rates of a cluster."""
    device, network = cluster.device, cluster.network
    return {
        "flops_per_s": device.peak_flops_per_s["fp32"].value,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s.value,
        "launch_overhead_s": device.launch_overhead_s.value,
        "latency_s": network.latency_s.value,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s.value,
    }
