"""Cells as TOML files of torchtitan: read back they are the same cell. So are all cells of the committed
scenarios, as flags of the programs that can mean them.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.jobs.flags import differences, program_flags
from spbench.bench.tools.jobs.torchtitan_models import models, stage_layers
from tests.tools.jobs.job_inputs import read
from tests.tools.jobs.test_flags import TORCHTITAN, cell, read_back, same

INTERLEAVED = [("interleaved", 2), ("interleaved", 4)]


@st.composite
def torchtitan_cells(draw: st.DrawFn) -> Cell:
    sizes = {axis: draw(st.sampled_from([1, 2, 4])) for axis in ("tp", "sp", "pp")} | {"dp": 4}
    names, options = [], {}
    if sizes["tp"] > 1:
        names.append("megatron_sp")
        options |= {"vocabulary": "split", "loss": draw(st.sampled_from(["parallel", "gathered"]))}
    if sizes["sp"] > 1:
        names.append(draw(st.sampled_from(["ring_attention", "all_gather_kv"])))
        options |= {"placement": "zigzag"} | ({"gradients": "ring"} if names[-1] == "all_gather_kv" else {})
    backend = draw(st.sampled_from(["zero2", "zero3"]))
    parts = draw(st.integers(1, 3)) * sizes["pp"]
    training: dict[str, Any] = {"data_parallel_replicate_degree": draw(st.sampled_from([1, 2]))}
    if sizes["pp"] > 1:
        schedule, virtual = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), *INTERLEAVED]))
        training |= {
            "schedule": schedule,
            "virtual_stages": virtual,
            "overlap_p2p_communication": virtual > 1,
        }
        if virtual <= 2 and draw(st.booleans()):  # more stages follow from a number of layers for each
            uneven = stage_layers(32, sizes["pp"] * virtual, 1, draw(st.integers(0, 2)))
            training |= {"stage_layers": uneven} if len({*uneven}) > 1 else {}
    losses = ["plain", "loss_parallel"] if options.get("loss") == "parallel" else ["plain", "compiled"]
    model = {"cross_entropy": draw(st.sampled_from(losses))} | draw(
        st.sampled_from(
            [
                {"recompute": "none"},
                {"recompute": "operators"},
                {"recompute": "full", "recompute_early_stop": True},
                {"recompute": "full", "recompute_method": "interval", "recompute_layers": 3},
            ]
        )
    )
    return cell(
        TORCHTITAN,
        strategy="+".join(names) or "single",
        strategy_options=options,
        sizes=sizes,
        batch=4 * parts * draw(st.integers(1, 3)),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        model="llama3-8b"
        if "stage_layers" in training
        else draw(st.sampled_from(["llama3-8b", "llama3-70b"])),
        model_options=model,
        mesh=["pp", "dp", "cp", "sp", "tp"],
        training=training
        | {
            "backend": backend,
            "micro_batches": parts,
            "reshard_rest": backend == "zero3" and (sizes["pp"] > 1 or draw(st.booleans())),
            **({"optimizer": "host", "parameters": "host"} if draw(st.booleans()) else {}),
        },
    )


@settings(deadline=None, max_examples=20, derandomize=True)
@given(torchtitan_cells())
def test_a_toml_of_torchtitan_is_the_same_cell_again(cell: Cell) -> None:
    found = program_flags("torchtitan", cell)
    assert found.missing == ()
    assert not [line for line in found.beside if line.startswith(("model_options", "training"))]
    assert same(cell, read_back("torchtitan", cell, found).cell())


@pytest.mark.parametrize(
    ("sizes", "routing"),
    [({"dp": 8}, "learned"), ({"dp": 8, "ep": 4}, "round_robin"),
     ({"dp": 4, "tp": 2, "ep": 4, "etp": 2}, "learned"),
     ({"dp": 4, "tp": 2, "ep": 8}, "learned"), ({"dp": 4, "tp": 2, "etp": 2}, "round_robin")],
)  # fmt: skip
def test_experts_of_torchtitan_are_the_same_cell_again(sizes: dict[str, int], routing: str) -> None:
    several = {"strategy": "megatron_sp", "strategy_options": {"vocabulary": "split", "loss": "parallel"}}
    made = {**models()["qwen3"]["30B-A3B"]["options"], "routing": routing, "separate_projections": True}
    one = cell(
        TORCHTITAN | {"model": "qwen3-30b-a3b", "model_options": {}},
        sizes=sizes,
        model_options=made | {"attention": "flash_attention_2"},
        training={"reshard_rest": False},
        **(several if "tp" in sizes else {}),
    )
    found = program_flags("torchtitan", one)
    assert (found.missing, [line for line in found.beside if "routing" not in line]) == ((), [])
    again = read_back("torchtitan", one, found).cell()
    assert again.sizes.by_axis == one.sizes.by_axis
    assert [path for path, *_ in differences(one, again) if path != "model_options.routing"] == []


@pytest.mark.parametrize(("name", "gpus"), [("llama3_8b.toml", 8), ("llama3_70b.toml", 64)])
def test_presets_of_torchtitan(name: str, gpus: int) -> None:
    found = program_flags("torchtitan", read("torchtitan", [name], gpus=gpus).cell())
    assert (found.missing, found.beside) == ((), ())


SCENARIOS = Path(__file__).parents[3] / "scenarios"
#: cells that each program means, at the least; few are of models by their names on Hugging Face
LEAST = {"megatron": 220, "torchtitan": 38, "accelerate": 4}
#: what a step has under any backend
_OF_ANY_BACKEND = {"micro_batches", "moments", "steps", "schedule", "virtual_stages", "stage_layers"}


def cells() -> Iterator[Cell]:
    """Each cell once that says its batch and length."""
    every = {
        cell.key: cell
        for path in sorted(SCENARIOS.glob("*.yaml"))
        for variant in load_scenario(path.stem).cells.values()
        for cell in variant
    }
    return (cell for cell in every.values() if cell.search is None)


def as_fsdp_shards(cell: Cell) -> Cell:
    """Committed cells on torchtitan are of a fork, whose loss and keys it has not: it has those of
    Megatron-LM's data parallelism, sharded."""
    if cell.training.backend != "megatron":
        return cell
    training = cell.training.model_dump(include=_OF_ANY_BACKEND) | {"backend": "zero3"}
    return Cell.model_validate(cell.model_dump() | {"training": training})


@pytest.mark.slow
def test_cells_that_programs_can_mean_come_back_equal() -> None:
    """:func:`program_flags` reads its own output back, and misses nothing where that is the same."""
    meant: Counter[str] = Counter()
    for each in cells():
        for program in LEAST:
            try:
                flags = program_flags(program, as_fsdp_shards(each) if program == "torchtitan" else each)
            except UserError as refused:
                raise AssertionError(f"{program}, {each.key}") from refused
            meant[program] += not flags.missing
            assert flags.missing or flags.lines
    assert {program: n for program, n in meant.items() if n < LEAST[program]} == {}
