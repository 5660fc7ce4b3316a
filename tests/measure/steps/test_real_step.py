"""A step on real ranks next to the same step on fake ranks: equal bytes, and equal memory of tensors."""

from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measurement import Measurement

EXAMPLES = Path(__file__).parents[2] / "examples" / "steps"


def measured(step: str, engine: str, ranks: int = 2) -> Measurement:
    cell = {"model": step, "strategy": "own_step", "sizes": {"dp": ranks}, "engine": engine}
    return run_cell(Cell.model_validate(cell))


@pytest.mark.parametrize(
    ("file", "apart"),
    # the CPU's attention keeps other statistics than a GPU's, which fake ranks play
    [("pipeline", 0.0), ("fsdp", 0.005)],
)
def test_real_ranks_measure_what_fake_ranks_do(file: str, apart: float):
    step = f"{EXAMPLES / file}.py:train"
    real, fake = measured(step, "distributed"), measured(step, "virtual")
    assert real.communication == fake.communication
    assert real.peak_memory_bytes == pytest.approx(fake.peak_memory_bytes, rel=apart, abs=0)
    assert real.peak_phase == fake.peak_phase
    assert len(real.step_time_samples_s) == 5


def test_an_error_on_a_real_rank_names_the_line(tmp_path: Path):
    (tmp_path / "step.py").write_text("def train():\n    raise ValueError('no data')\n", encoding="utf-8")
    with pytest.raises(RankError) as error:
        measured(f"{tmp_path / 'step.py'}:train", "distributed", 1)
    assert "step.py:2, raise ValueError('no data')" in error.value.reason
