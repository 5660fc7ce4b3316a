"""The backends ``deepspeed_zero2`` and ``deepspeed_zero1`` send what DeepSpeed sends, in its order."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.simulator.program import Kind
from tests.cells import make_cell

RUNS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))["runs"]
SIZES = {"layers": 3, "hidden": 64, "inner": 208, "heads": 4, "kv_heads": 2, "vocabulary": 512}
SIZES |= {"separate_projections": True, "recompute": "full", "recompute_early_stop": True}
#: keys of DeepSpeed that change nothing
WITHOUT_EFFECT = {"stage", "allgather_bucket_size"}


def step_of(ranks: int, micro_batches: int = 1, **training: Any) -> Cell:
    training["micro_batches"] = micro_batches
    sizes = {"sizes": {"dp": ranks}, "mesh": ["dp"], "training": training}
    return make_cell(
        "llama3-8b", "single", {}, ranks * micro_batches, 8, "bf16", model_options=SIZES, **sizes
    )


def sent_by(name: str, zero: Mapping[str, Any], micro_batches: int, **settings: Any) -> list[tuple[str, int]]:
    """The collectives of a step, as (phase and kind, bytes), in their order."""
    settings |= {key: value for key, value in zero.items() if key not in WITHOUT_EFFECT}
    program = tracing.trace(step_of(2, micro_batches, backend=name, **settings), events=True).program
    assert program is not None
    sent = []
    for event in (program.kind == Kind.COLLECTIVE).nonzero()[0].tolist():
        # sums after the last backward, of stage 1, are a phase of their own
        phase = program.phase_of(event).replace("gradient_sync", "backward")
        sent.append((f"{phase} {program.names[program.name[event]]}", int(program.nbytes[event])))
    return sent


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_step_sends_as_deepspeed_does(run: Mapping[str, Any]) -> None:
    zero, settings = run["zero"], {}
    if run.get("settings") == {"communication_data_type": "fp32"}:
        settings["reduce_dtype"] = "fp32"
    sent = sent_by(f"deepspeed_zero{zero['stage']}", zero, run["micro_batches"], **settings)
    ours = [{what: [n for _, n in each]} for what, each in groupby(sent, lambda each: each[0])]
    assert ours == run["sent"]


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_traced_rank_keeps_most_whole_gradients(contiguous: bool) -> None:
    """Ranks keep whole gradients of the weights at the borders of partitions, so that some hold more."""
    asked = step_of(
        8, 2, backend="deepspeed_zero2", contiguous_gradients=contiguous, reduce_bucket_size=20000
    )
    held = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(8)]
    (of_all,) = rank_classes(asked)
    assert held[of_all.first] == max(held) > held[0]
