"""Outcomes that are kept: the same question is answered from disk, and without a disk it is asked again."""

from __future__ import annotations

from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.disk_cache import CACHE_FOLDER
from spbench.bench.measurement import Measurement
from spbench.bench.tools.fit import answers
from spbench.bench.tools.fit.answers import Answers
from tests.bench.crew import CrewHere

CELL = Cell(model="causal-transformer-tiny", strategy="single", batch=2, seq_len=64)


@pytest.mark.parametrize(("kept", "runs"), [(True, 1), (False, 2)])
def test_what_was_answered_is_read_where_it_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, runs: int
) -> None:
    monkeypatch.setattr(answers, "Crew", CrewHere)
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path) if kept else "off")
    taken: list[str] = []

    def run(cell: Cell) -> Measurement:
        taken.append(cell.key)
        return Measurement(peak_memory_bytes=7)

    for _ in range(2):
        with Answers(run, jobs=1) as asked:
            ((_, outcome),) = asked([CELL])
            assert outcome.measurement["peak_memory_bytes"] == 7
    assert len(taken) == runs
