"""All cells of the committed scenarios as flags of programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.jobs.flags import program_flags

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
    for cell in cells():
        for program in LEAST:
            try:
                flags = program_flags(program, as_fsdp_shards(cell) if program == "torchtitan" else cell)
            except UserError as refused:
                raise AssertionError(f"{program}, {cell.key}") from refused
            meant[program] += not flags.missing
            assert flags.missing or flags.lines
    assert {program: n for program, n in meant.items() if n < LEAST[program]} == {}
