"""scripts/own_steps.py: every job names a step and a model of its own, and a difference is told by name."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.measure.engines.cells import written_cell

SCRIPT = Path(__file__).parents[2] / "scripts" / "own_steps.py"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="script")


def test_every_job_names_a_step_and_what_it_is_compared_with(names: dict[str, Any]) -> None:
    for job in names["jobs"]([]):
        file, _, function = job.step.partition(":")
        tree = ast.parse(SCRIPT.with_suffix("").joinpath(file).read_text())
        defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assigned = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
        assert function in defined | assigned
        assert bool(job.registry) != bool(job.cell)
        if job.cell:
            cell = job._allocating(job._of_scenario())
            assert (cell.sizes.world, cell.training.cuda_alloc_conf) == (job.ranks, None)


def test_jobs_are_chosen_by_a_text(names: dict[str, Any]) -> None:
    assert [job.ranks for job in names["jobs"](["FSDP 64"])] == [64]


def test_a_difference_is_told_by_its_name(names: dict[str, Any]) -> None:
    step, cell = {"all_gather in forward": 7.0, "send": 1.0}, {"all_gather in forward": 6.0, "send": 1.05}
    assert [*names["differences"](step, cell, 0.1)] == [
        "all_gather in forward: 7.00 in the step, 6.00 in the cell (-1.00)"
    ]


def test_what_a_rank_sends_is_counted_by_collective(names: dict[str, Any]) -> None:
    shape = {"batch": 2, "seq_len": 16, "sizes": {"dp": 2}}
    cell = written_cell({"model": "causal-transformer-tiny", "strategy": "single", **shape})
    traces = names["trace_classes"](cell)
    assert sum(names["sent_mib"](traces).values()) > 0
    held, peak = names["held_gib"](traces), traces.memory_measurement().peak_memory_bytes
    assert sum(held.values()) == pytest.approx(peak / 2**30)
