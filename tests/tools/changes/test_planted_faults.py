"""What is worse is in the Markdown, in the JUnit file and in the exit code of `spbench compare`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import junitparser
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.run_cell import measure, run_cell
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.sweep.sweep import as_row
from tests.tools.changes.conftest import Judge
from tests.tools.changes.reading import cases, tables
from tests.tools.changes.rows import BASE, Rows, made_up, one_byte_more, planted


def status_flipped(rows: Rows) -> None:
    rows[1] |= {"status": "oom", "reason": "no room"}


def cell_removed(rows: Rows) -> None:
    del rows[1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            one_byte_more,
            [
                "❌ worse",
                "a",
                "sent_bytes",
                "6,383,206,414",
                "6,383,206,415",
                "+1",
                "messages in forward +1 byte",
            ],
        ),
        (status_flipped, ["❌ worse", "b", "status", "ok", "oom", "", "no room"]),
        (cell_removed, ["❌ missing", "b", "cell", "ok", "", "", ""]),
    ],
)
def test_what_is_worse_is_in_the_comment_the_report_and_the_exit_code(
    judged: Judge, change: Callable[[Rows], Any], line: list[str]
) -> None:
    code, markdown, junit = judged(planted(change), BASE)
    assert code == 1
    assert tables(markdown)[0] == [line]
    assert "## spbench: worse" in markdown
    (failure,) = cases(junit)[line[1]].result
    assert isinstance(failure, junitparser.Failure)
    assert failure.type == line[0].split()[1]
    assert line[2] in failure.message
    assert {name for name, case in cases(junit).items() if case.result} == {line[1]}


def test_a_new_cell_is_shown_and_fails_nothing(judged: Judge) -> None:
    code, markdown, junit = judged([*BASE, made_up("d")], BASE)
    assert code == 0
    assert tables(markdown)[0] == [["🆕 new", "d", "cell", "", "ok", "", ""]]
    assert "not worse" in markdown
    assert "1 new, 3 cells unchanged, 1 claims unchanged." in markdown
    assert cases(junit)["d"].result[0].message == "not judged: the cell is new"


def test_a_kernel_that_is_5_percent_slower(judged: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the simulator: the kernel of a step that takes longest."""
    kernels = Costs.kernels

    def slower(self: Costs, program: Any) -> Any:
        seconds = kernels(self, program)
        seconds[seconds.argmax()] *= 1.05
        return seconds

    cell = Cell(
        model="bert-tiny",
        strategy="tensor_parallel",
        sizes={"tp": 2},
        batch=2,
        seq_len=8,
        cluster="piz-daint-p100",
    )
    before = as_row(cell, measure(run_cell, cell)).as_written()
    monkeypatch.setattr(Costs, "kernels", slower)
    after = as_row(cell, measure(run_cell, cell)).as_written()
    code, markdown, junit = judged([after], [before])
    assert code == 1
    ((verdict, where, quantity, *_, change, moved),) = tables(markdown)[0]
    assert (verdict, where, quantity) == ("❌ worse", cell.key, "step_time_s")
    assert 0 < float(change.rstrip("%")) <= 5
    assert re.fullmatch(r"(memory-bound operators|matrix products) \+[0-9.]+ us", moved)
    (failure,) = cases(junit)[cell.key].result
    assert "step_time_s" in failure.message
