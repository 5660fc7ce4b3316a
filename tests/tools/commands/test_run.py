"""spbench run: what is printed where, what is kept, and exit codes.

A run says which attention kernel stood for that which nobody named.

``--plain-trace``: the quick way to trace gives the numbers of the plain one, bit by bit.
"""

import errno
import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spbench.bench.cell import Cell
from spbench.bench.command_line.scenario_run import default_attention
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measure.sweep.results import RESULTS_FILE, ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measurement import Measurement, Outcome, Status
from spbench.bench.row import Row
from tests.bench import fakes
from tests.bench.fakes import SCENARIO
from tests.grid import data
from tests.measure.sweep.test_digest import sweep_here
from tests.tools.commands.conftest import Run

RUN = ("run", "--scenario", "small.yaml")


def test_run_prints_tables_and_paths(spbench: Run) -> None:
    code, out, err = spbench(*RUN)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("A small scenario (batch 64, precision fp16, cluster piz-daint-p100")
    ring = next(line for line in lines if "| ring_self_attention |    8 |" in line)
    assert "8000" in ring
    assert "1.00" in ring  # GiB
    claim = next(line for line in lines if "rsa-max-seqlen-base" in line)
    assert [cell.strip() for cell in claim.split("|")[1:7]] == [
        *("rsa-max-seqlen-base", "first", "3", "4", "+33.3%", "predicted")
    ]
    assert lines[-5:] == [
        *("results/runs/small/cells.jsonl", "results/runs/small/comparison.csv", ""),
        "published numbers: 1 predicted, median error 33.3%, worst 33.3%; 1 inferred, median error 96.5%, "
        "worst 96.5%",
        "5 cells: 5 ok",
    ]
    assert all(Path(line).is_file() for line in lines[-5:-3])
    assert "small: A small scenario: 5 cells; running 5" in err
    assert "[5/5] " in err


def test_memory_of_rank_classes_is_shown_where_it_is_asked_for(
    spbench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"rank": 0, "ranks": 2, "stage": 0, "step": 1, "status": "ok", "peak_phase": "forward"}
    sizes = {"peak_memory_bytes": 2**30, "reserved_memory_bytes": 2**31, "allocated_bytes": 2**29}
    held, without = {"peak_held": {"parameters": 2**30}}, fakes.answer

    def answered(cell: Cell) -> Measurement:
        return without(cell).model_copy(update={"by_class": [memory | sizes | held]})

    monkeypatch.setattr(fakes, "answer", answered)
    assert "each rank class" not in spbench(*RUN)[1]
    code, out, _ = spbench(*RUN, "--memory", "--strategy", "tensor_parallel", "--fresh")
    assert code == 0
    table = out[out.index("Memory of each rank class at each step") :].splitlines()
    assert len([line for line in table if "| parameters 1.00" in line]) == 2


def test_cells_that_look_alike_show_what_tells_them_apart(spbench: Run) -> None:
    alike = SCENARIO.replace(
        "layers: 3}", "layers: 3}\n  - {strategy: single, model_options: {layers: 1}}", 1
    )
    Path("small.yaml").write_text(alike)
    assert "options" not in spbench(*RUN, "--fresh")[1].splitlines()[1]
    two = "  - {strategy: single, model_options: {layers: 2}, training: {micro_batches: 2}}\n"
    again = alike.replace("variants:", f"{two}variants:")
    Path("small.yaml").write_text(again)
    lines = spbench(*RUN)[1].splitlines()
    assert "options" in lines[1]
    own = ("layers=1", "layers=2", "micro_batches=2")  # and no default beside
    assert [sum(text in line for line in lines) for text in (*own, "micro_batches=")] == [1, 1, 1, 1]


FAULTY = [
    ("mismatch", "closed form 5 B, metered 4 B", False),
    ("numerics", "a loss at step 3 is not finite", True),
]


@pytest.mark.parametrize(("status", "reason", "final"), FAULTY)
def test_wrong_results_are_exit_code_1(
    spbench: Run, monkeypatch: pytest.MonkeyPatch, status: Status, reason: str, final: bool
) -> None:
    monkeypatch.setattr(fakes, "answer", lambda cell: Measurement(status=status, reason=reason))
    code, _, err = spbench(*RUN)
    assert code == 1
    assert err.count(f": {status}, {reason}") == 5  # a line for each cell
    summary = f"spbench: 5 of 5 cells failed (5 {status})"
    assert err.splitlines()[-1] == summary + "; the same command tries them again" * (not final)
    code, _, err = spbench(*RUN)
    assert code == 1
    assert ("5 of them kept" in err) is final


def test_the_limit_of_a_cell(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def timed_out(cell: Cell) -> Measurement:
        limits.append(cell.timeout_s)
        return Measurement(status="timeout", reason="no end")

    monkeypatch.setattr(fakes, "answer", timed_out)
    Path("small.yaml").write_text(SCENARIO.replace("groups:\n", "  timeout_s: 60\ngroups:\n", 1))
    code, _, err = spbench(*RUN)
    assert (code, limits) == (1, [60.0] * 5)
    assert err.splitlines()[-1] == (
        "spbench: 5 of 5 cells failed (5 timeout); the same command tries them again"
    )
    assert spbench(*RUN, "--timeout", "90.5")[0] == 1  # the same cells, tried again
    assert limits[5:] == [90.5] * 5
    assert len(read_rows(Path("results/runs/small") / RESULTS_FILE)[0]) == 5


def test_second_run_keeps_and_fresh_starts_again(spbench: Run) -> None:
    spbench(*RUN, "--strategy", "ring_self_attention")
    code, out, err = spbench(*RUN)
    assert (code, "5 cells, 3 of them kept from before; running 2" in err) == (0, True)
    assert spbench(*RUN)[1] == out
    code, _, err = spbench(*RUN, "--fresh")
    assert "earlier results are now results/runs/small/cells.1.jsonl" in err
    assert "running 5" in err
    assert len(read_rows(Path("results/runs/small/cells.1.jsonl"))[0]) == 5


def test_formats(spbench: Run, tmp_path: Path) -> None:
    code, out, _ = spbench(*RUN, "--format", "json", "--output", "o")
    content = json.loads(out)
    assert (code, content["scenario"], len(content["rows"])) == (0, "small", 5)
    assert content["comparison"][0]["reproduced"] == 4.0
    assert content["files"] == ["o/cells.jsonl", "o/comparison.csv"]
    (tmp_path / "table.csv").write_text(spbench(*RUN, "--format", "csv", "--output", "o")[1])
    frame = pd.read_csv(tmp_path / "table.csv")
    assert frame.answer.tolist() == [1000, 2000, 1000, 4000, 8000]


def test_dry_run_writes_nothing(spbench: Run) -> None:
    code, out, _ = spbench(*RUN, "--dry-run", "--world-size", "4,8", "--world-size", "1")
    assert (code, out.count("would run"), Path("results").exists()) == (0, 4, False)
    spbench(*RUN, "--world-size", "4")
    code, out, _ = spbench(*RUN, "--dry-run", "--format", "json")
    assert [line["now"] for line in json.loads(out)].count("kept (ok)") == 1
    code, out, _ = spbench(*RUN, "--dry-run", "--where", "sizes.sp=4,sizes.sp=8", "--format", "csv")
    assert [line.split(",")[3] for line in out.splitlines()] == ["GPUs", "4", "8"]


def test_failed_cells_are_exit_code_1_and_unsupported_ones_are_not(spbench: Run) -> None:
    code, out, _ = spbench(*RUN, "--world-size", "3")
    assert code == 0
    assert out.count("3 ranks do not divide; use 2 or 4") == 2
    code, out, err = spbench(*RUN, "--world-size", "5,8")
    assert code == 1
    assert "ValueError: five is a fault" in out
    assert err.splitlines()[-1] == "spbench: 2 of 3 cells failed; the same command tries them again"


def test_a_status_can_be_required(spbench: Run) -> None:
    code, _, err = spbench(*RUN, "--world-size", "3", "--must-fit")
    assert (code, err.splitlines()[-1]) == (1, "spbench: 2 of 2 cells are not ok: 2 unsupported")
    assert spbench(*RUN, "--world-size", "2", "--must-fit")[0] == 0


def test_claims_of_a_narrowed_run_say_what_is_missing(spbench: Run) -> None:
    _, out, _ = spbench(*RUN, "--world-size", "8")
    assert "a ratio; denominator was not run" in out
    _, out, _ = spbench(*RUN, "--world-size", "2")  # with the row of the run before
    assert "+33.3%" in out


def test_truncated_results_are_a_warning(spbench: Run) -> None:
    spbench(*RUN)
    file = Path("results/runs/small/cells.jsonl")
    file.write_bytes(file.read_bytes()[:-30])
    code, _, err = spbench(*RUN)
    assert code == 0
    assert f"spbench: warning: {file}:5: not a result row, skipped" in err
    assert "4 of them kept from before; running 1" in err
    rows, problems = read_rows(file)
    assert (len(rows), problems) == (5, [])


def test_full_disk(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    append = ResultsFile.append
    with monkeypatch.context() as patch:

        def full_after_two(results: ResultsFile, row: Row) -> None:
            if len(results.rows) == 2:
                patch.setattr(os, "write", full)
            append(results, row)

        patch.setattr(ResultsFile, "append", full_after_two)
        code, out, err = spbench(*RUN)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "spbench: cannot write to results/runs/small/cells.jsonl: No space left on device; "
        "its earlier rows are whole, and the same command goes on from there"
    )
    assert len(read_rows(Path("results/runs/small/cells.jsonl"))[0]) == 2
    assert "2 of them kept from before; running 3" in spbench(*RUN)[2]


FIGURE = data(__file__)["FIGURE"]


FAILING = [
    ("def draw(*_):\n    raise ValueError('no ink')\n", "ValueError: no ink"),
    ("import a_library_that_is_absent\ndraw = None\n", "No module named 'a_library_that_is_absent'"),
]


def test_figures(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spbench(*RUN)[0] == 0
    Path("small.yaml").write_text(SCENARIO + "figure: a_figure\n")
    code, _, err = spbench(*RUN)
    assert (code, "figure: unknown figure 'a_figure'" in err) == (2, True)
    monkeypatch.setattr("spbench.plots.__path__", [str(Path().absolute())])
    Path("a_figure.py").write_text(FIGURE)
    code, out, _ = spbench(*RUN, "--strategy", "tensor_parallel")  # the others are known from before
    assert (code, "\nresults/runs/small/a_figure.png\n\n" in out) == (0, True)
    for source, reason in FAILING:
        monkeypatch.delitem(sys.modules, "spbench.plots.a_figure", raising=False)
        importlib.invalidate_caches()
        Path("a_figure.py").write_text(source)
        code, out, err = spbench(*RUN)
        assert code == 1
        assert re.search(f"the figure a_figure could not be drawn: .*{reason}", err.splitlines()[-1])
        assert "+33.3%" in out


def test_a_figure_of_which_the_cells_have_nothing_is_an_error(spbench: Run) -> None:
    Path("small.yaml").write_text(f"{SCENARIO}\nfigure: methods\n")
    code, _, err = spbench("run", "--scenario", "small.yaml")
    said = (
        "the figure methods was not drawn: no cell here has what it shows: measurements at a given sequence"
    )
    assert (code, said in err) == (1, True)
    assert not list(Path("results/runs/small").glob("*.png"))


def row(cluster: str, seconds: float = 1.0, model: str = "llama3-8b", **options: Any) -> dict[str, Any]:
    return {
        "cell": {"cluster": cluster, "model": model, "model_options": options},
        "measurement": {"parts": {"attention_s": seconds}},
    }


@pytest.mark.parametrize(
    "rows",
    [
        [row("dgx-h100", attention="flash_attention_3")],
        [row("dgx-h100", 0.0)],  # none at all, as of attention by scores
        [row("dgx-a100")],  # whose usual kernel is its file's default
        [row("l40s"), row("local")],
        [row("dgx-h100", model="tnl-1b")],  # of linear attention, which has no such option
    ],
)
def test_where_one_is_said_or_there_is_no_other_nothing_is_told(rows: list[dict[str, Any]]) -> None:
    assert default_attention(rows) == []


def test_the_kernel_that_is_taken_is_told_once_for_each_cluster() -> None:
    told = default_attention([row("dgx-h100"), row("dgx-h100", attention="flash"), row("dgx-a100")])
    assert told == ["flash_attention_2, the default of dgx-h100 (its programs usually run cudnn)"]


def measurements(folder: Path) -> dict[str, Any]:
    """What was measured, by the cells' keys."""
    rows, problems = read_rows(folder / RESULTS_FILE)
    assert not problems
    assert rows
    return {row["key"]: (row["status"], row["reason"], row["measurement"]) for row in rows}


def both(command_line: Run, scenario: str, folder: Path) -> None:
    """Run a scenario in both ways, and compare all that was measured."""
    for name, way in (("plain", "--plain-trace"), ("quick", "--fresh")):
        words = ["run", "--scenario", scenario, "--output", str(folder / name), way]
        code, _, messages = command_line(*words)
        assert code == 0, messages
        assert (folder / "cache" / "traces").exists() == (name == "quick")
    assert measurements(folder / "quick") == measurements(folder / "plain")


@pytest.mark.slow
def test_both_ways_measure_the_same_and_the_plain_one_keeps_no_trace(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which keeps traces as a worker does."""
    shutil.copy(Path(__file__).with_name("small_steps.yaml"), tmp_path / "small.yaml")
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep_cells", traces.keeping_traces()(sweep_here))
    both(command_line, str(tmp_path / "small.yaml"), tmp_path)
    assert tracing.PLAIN_TRACE not in os.environ


def test_a_plain_run_takes_no_earlier_result(command_line: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    words = ["run", "--scenario", str(tmp_path / "small.yaml"), "--output", str(tmp_path), "--dry-run"]
    (cell, *_) = Narrowing().cells(load_scenario(str(tmp_path / "small.yaml")))
    with ResultsFile(tmp_path) as results:
        results.append(as_row(cell, Outcome("ok")))
    assert "kept (ok)" in command_line(*words)[1]
    assert "kept" not in command_line(*words, "--plain-trace")[1]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["gate", "rsa_table4", "lasp_scalability", "dsp_throughput"])
def test_both_ways_measure_the_same_in_whole_tables(
    command_line: Run, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    both(command_line, scenario, tmp_path)
