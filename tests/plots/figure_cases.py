"""A figure of rows and what must be in it, and rows to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pandas import DataFrame

from spbench.plots.grid import Drawing
from tests.plots.rows import published, ran

Row = dict[str, Any]
GIB = 2**30
TOKENS = "throughput_tokens_per_s"
ALONE = "No sequence parallelism"
TP, RSA = "Tensor parallelism", "Ring Self-Attention"
TNL = "TransNormerLLM 1B, 8 GPUs"
LOST = "out of memory from here on"


@dataclass(frozen=True)
class Case:
    """A figure of rows, and what must be in it.

    Attributes:
        data: by id, of each artist of it in the order of panels: the points of a line, the length of a bar;
            "...": whatever it is.
        marks: ids of what stands below the zero of its panel, and its place, or None.
        absent: ids of what is not drawn.
        axes: the labels of the y axes, of the first panels.
        notes: texts that are in the notes; empty: there are none.
    """

    draw: Drawing
    rows: Sequence[Row]
    comparison: DataFrame = field(default_factory=DataFrame)
    titles: Sequence[str] = ()
    axes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, Any] = field(default_factory=dict)
    absent: Sequence[str] = ()
    legend: Sequence[str] | None = None
    notes: Sequence[str] | None = None


def steps(strategy: str, axis: str, count: int, length: int, status: str = "ok", **cell: Any) -> Row:
    """A step: a GiB for each 1024 positions of a GPU's part, 1000 tokens/s and a sample/s a GPU."""
    numbers = {
        "peak_memory_bytes": length // count * 2**20,
        "tokens_per_s": 1000.0 * count,
        "samples_per_s": float(count),
        "step_time_s": 4.0 / count,
    } | cell.pop("measured", {})
    given = {"model": "tnl-1b", "batch": 1, **cell}
    return ran(status, numbers, strategy=strategy, sizes={axis: count}, seq_len=length, **given)


def skewed(routing: str, variant: str) -> Row:
    """A step of experts that is longer and larger with the skew."""
    skew = float(routing.partition(":")[2] or 0)
    numbers = {"peak_memory_bytes": (20 + 2 * skew) * GIB, "step_time_s": 0.1 + 0.04 * skew}
    cell = {"model": "qwen3-30b-a3b", "model_options": {"routing": routing}, "strategy": "ulysses"}
    mesh = {"sizes": {"dp": 2, "sp": 4, "ep": 8}, "cluster": "dgx-h100", "batch": 2, "seq_len": 16384}
    return ran("ok", {**numbers, "expert_imbalance": 1 + skew}, variant=variant, **cell, **mesh)


def sized(strategy: str, count: int, frames: int, status: str = "ok", **options: Any) -> Row:
    """A step of videos of as many frames."""
    cut, measured_ = options.pop("cut", None), options.pop("measured", {})
    axis = {"megatron_sp": "tp", "single": "dp"}.get(strategy, "sp")
    return steps(
        *(strategy, axis, count, frames * 4096, status),
        model=options.pop("model", "st-dit-xl"),
        model_options={"temporal": frames, **options},
        strategy_options={} if cut is None else {"grid_dim": cut},
        measured=measured_,
    )


def formula(row: Row, claim: str, number: float, ours: float | None) -> dict[str, Any]:
    error = None if ours is None else ours / number - 1
    name = f"{claim}, {row['cell']['sizes']['sp']} GPUs, {row['cell']['engine']}"
    about = {"claim": name, "reproduced": ours, "relative_error": error, "status_published": ""}
    return {**published(row, "sent_elements", number), **about}
