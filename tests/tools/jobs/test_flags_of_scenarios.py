"""Cells of programs that were run, as flags of these: nothing of them is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.jobs.flags import differences, program_flags
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.papers.megatron_cases import cases
from tests.tools.jobs.job_inputs import read


@pytest.mark.parametrize(
    ("name", "cells"), [("megatron_b200", 12), ("megatron_b200_more", 15), ("usp", 80), ("upipe", 12)]
)
def test_cells_of_megatron(name: str, cells: int) -> None:
    found = [cell for variant in load_scenario(name).cells.values() for cell in variant]
    assert len(found) == cells
    assert [program_flags("megatron", cell).missing for cell in found] == [()] * cells


@pytest.mark.parametrize(("name", "gpus"), [("llama3_8b.toml", 8), ("llama3_70b.toml", 64)])
def test_presets_of_torchtitan(name: str, gpus: int) -> None:
    found = program_flags("torchtitan", read("torchtitan", [name], gpus=gpus).cell())
    assert (found.missing, found.beside) == ((), ())


@pytest.mark.slow
def test_megatrons_functional_tests_and_back() -> None:
    """All that are imported are the same cells again, but for BERT's."""
    back = 0
    for case in cases():
        try:
            cell = case.job.cell()
        except UserError:
            continue
        found = program_flags("megatron", cell)
        if cell.model.startswith("bert"):
            assert found.missing
            continue
        assert found.missing == ()
        again = read_job("megatron", [JobFile(Path("x"), found.text().encode())], cluster=cell.cluster)
        assert [*differences(cell, again.cell())] == []
        back += 1
    assert back >= 300
