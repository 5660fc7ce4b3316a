"""The command line: what is printed where, exit codes, and one line for each thing a user can get wrong."""

import errno
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spbench.bench.cell import Cell, Measurement, Status
from spbench.bench.cli import main
from spbench.bench.sweep.results import RESULTS_FILE, ResultsFile, Row, read_rows
from spbench.bench.sweep.sweep import as_row, unfinished
from spbench.bench.verification.cases import VerifyRow
from spbench.bench.workers.worker import measure
from tests.bench.commands.conftest import Run
from tests.bench.fakes import SCENARIO, answer


def sweep_here(cells: list[Cell], results: ResultsFile, **hooks: Any) -> list[Row]:
    """A sweep in this process, on made-up answers."""
    for cell in unfinished(cells, results):
        hooks["on_start"](cell)
        row = as_row(cell, measure(answer, cell))
        results.append(row)
        hooks["on_end"](row)
    return [results.rows[cell.key] for cell in cells]


@pytest.fixture
def spbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run a command line in an empty folder with small.yaml; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spbench.bench.sweep.sweep.sweep", sweep_here)
    monkeypatch.delenv("SPBENCH_DEBUG", raising=False)
    Path("small.yaml").write_text(SCENARIO)
    return command_line


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
    assert lines[-2:] == ["results/runs/small/cells.jsonl", "results/runs/small/comparison.csv"]
    assert all(Path(line).is_file() for line in lines[-2:])
    assert "small: A small scenario: 5 cells; running 5" in err
    assert "[5/5] " in err


def test_memory_of_rank_classes_is_shown_where_it_is_asked_for(
    spbench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"rank": 0, "ranks": 2, "stage": 0, "step": 1, "status": "ok", "peak_phase": "forward"}
    sizes = {"peak_memory_bytes": 2**30, "reserved_memory_bytes": 2**31, "allocated_bytes": 2**29}
    held, without = {"peak_held": {"parameters": 2**30}}, answer

    def answered(cell: Cell) -> Measurement:
        return replace(without(cell), by_class=[memory | sizes | held])

    monkeypatch.setattr("tests.bench.commands.test_cli.answer", answered)
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
    again = alike.replace("variants:", "  - {strategy: single, model_options: {layers: 2}}\nvariants:")
    Path("small.yaml").write_text(again)
    lines = spbench(*RUN)[1].splitlines()
    assert "options" in lines[1]
    assert sum("layers=1" in line for line in lines) == sum("layers=2" in line for line in lines) == 1


FAULTY = [
    ("mismatch", "closed form 5 B, metered 4 B", False),
    ("numerics", "a loss at step 3 is not finite", True),
]


@pytest.mark.parametrize(("status", "reason", "final"), FAULTY)
def test_wrong_results_are_exit_code_1(
    spbench: Run, monkeypatch: pytest.MonkeyPatch, status: Status, reason: str, final: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "answer", lambda cell: Measurement(status, reason))
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
        return Measurement("timeout", "no end")

    monkeypatch.setattr(sys.modules[__name__], "answer", timed_out)
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
    code, _, err = spbench(*RUN, "--world-size", "3", "--require", "ok")
    assert (code, err.splitlines()[-1]) == (1, "spbench: 2 of 2 cells are not ok: 2 unsupported")
    assert spbench(*RUN, "--world-size", "2", "--require", "ok")[0] == 0


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
    assert len(read_rows(file)[0]) == 5


WRONG = [
    (("run", "--scenario", "max_seqln"), "unknown scenario 'max_seqln'"),
    (("run", "--scenario", "absent.yaml"), "no scenario file absent.yaml"),
    (("run", "--scenario", "malformed.yaml"), "malformed.yaml:1:"),
    (
        ("run", "--scenario", "negative.yaml"),
        "negative.yaml: groups[0].sizes.tp: must be greater than 0, not -2",
    ),
    (("run",), "Missing option '--scenario'"),
    (
        (*RUN, "--strategy", "tensor_paralel"),
        "unknown strategy 'tensor_paralel'; did you mean 'tensor_parallel'?",
    ),
    ((*RUN, "--model", "bert-base"), "has no cell with model bert-base"),
    ((*RUN, "--cluster", "x"), "unknown cluster 'x'"),
    ((*RUN, "--engine", "x"), "unknown engine 'x'"),
    ((*RUN, "--world-size", "four"), "'four' is not a whole number of at least 1"),
    ((*RUN, "--world-size", "-4"), "'-4' is not a whole number of at least 1"),
    ((*RUN, "--jobs", "0"), "Invalid value for '--jobs'"),
    ((*RUN, "--timeout", "0"), "Invalid value for '--timeout'"),
    ((*RUN, "--format", "xml"), "Invalid value for '--format'"),
    ((*RUN, "--output", "small.yaml"), "cannot write results to small.yaml/cells.jsonl"),
    ((*RUN, "--output", "taken"), "cannot write results to taken/cells.jsonl: Is a directory"),
    ((*RUN, "--scenrio"), "No such option '--scenrio'"),
    (("rnu",), "No such command 'rnu'"),
    (("list", "scenario"), "Invalid value for"),
    (("verify", "--strategy", "x"), "unknown strategy 'x'"),
    (("verify", "--strategy", "megatron_sp+x"), "unknown strategy 'x'"),
    (("verify", "--strategy", "usp"), "unknown strategy 'usp'; here that is ulysses+ring_attention"),
    (("verify", "--strategy", "lasp+ulysses"), "around another strategy; write ulysses+lasp"),
    (("verify", "--model", "bert-tny"), "unknown model 'bert-tny'; did you mean 'bert-tiny'?"),
    (("verify", "--dtype", "fp8"), "unknown dtype 'fp8'"),
    (("verify", "--part", "x"), "unknown part 'x'"),
    (("verify", "--strategy", "yunchang_rng"), "did you mean 'yunchang_ring'?"),
    (("verify", "--strategy-option", "placement=zigzag"), "add --strategy"),
    (
        ("verify", "--strategy", "ring_attention", "--strategy-option", "placement=zigzg"),
        "placement is one of contiguous, striped, zigzag, not 'zigzg'",
    ),
    (("verify", "--strategy", "ulysses", "--strategy-option", "pad_head=1"), "did you mean 'pad_heads'?"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=[" ".join(arguments[-2:]) for arguments, _ in WRONG]
)
def test_user_errors_are_one_line(spbench: Run, arguments: tuple[str, ...], message: str) -> None:
    Path("malformed.yaml").write_text("groups: [")
    Path("negative.yaml").write_text(SCENARIO.replace("tp: [1, 2]", "tp: [1, -2]"))
    Path("taken", RESULTS_FILE).mkdir(parents=True)
    code, out, err = spbench(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("spbench: ")
    assert message in err
    assert err.count("\n") == 1


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


def test_internal_errors_have_a_code_of_their_own(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spbench.bench.sweep.sweep.sweep", lambda *_, **__: 1 / 0)
    code, _, err = spbench(*RUN)
    assert code == 70
    assert err.splitlines()[-1].startswith("spbench: internal error: ZeroDivisionError: division by zero")
    assert "Traceback" not in err
    monkeypatch.setenv("SPBENCH_DEBUG", "1")
    assert "Traceback" in spbench(*RUN)[2]


def test_only_a_failure_of_the_output_is_told_as_one(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the system without a file's name come from processes, sockets and memory, too."""

    def failing(error: OSError) -> tuple[int, str]:
        def sweep(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("spbench.bench.sweep.sweep.sweep", sweep)
        code, _, err = spbench(*RUN)
        return code, err.splitlines()[-1]

    code, said = failing(OSError(errno.EMFILE, "Too many open files"))
    assert (code, "Too many open files" in said, "standard output" in said) == (70, True, False)
    code, said = failing(BrokenPipeError(errno.EPIPE, "Broken pipe"))  # of a pipe to another process
    assert (code, "Broken pipe" in said) == (70, True)
    code, said = failing(OSError(errno.ENOSPC, "No space left on device", "some.file"))
    assert (code, said) == (2, "spbench: some.file: No space left on device")


FIGURE = """
from pathlib import Path

def draw(rows, comparison, output):
    assert [row["status"] for row in rows] == ["ok"] * 5
    assert comparison.relative_error.notna().all()
    return [output / "a_figure.png"]
"""
FAILING = [
    ("def draw(*_):\n    raise ValueError('no ink')\n", "ValueError: no ink"),
    ("import a_library_that_is_absent\ndraw = None\n", "No module named 'a_library_that_is_absent'"),
]


def test_figures(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("small.yaml").write_text(SCENARIO + "figure: a_figure\n")
    code, _, err = spbench(*RUN)
    assert (code, "warning: no figure drawn: unknown figure 'a_figure'" in err) == (0, True)
    monkeypatch.setattr("spbench.plots.__path__", [str(Path().absolute())])
    Path("a_figure.py").write_text(FIGURE)
    code, out, _ = spbench(*RUN, "--strategy", "tensor_parallel")  # the others are known from before
    assert (code, out.splitlines()[-1]) == (0, "results/runs/small/a_figure.png")
    for source, reason in FAILING:
        monkeypatch.delitem(sys.modules, "spbench.plots.a_figure", raising=False)
        importlib.invalidate_caches()
        Path("a_figure.py").write_text(source)
        code, out, err = spbench(*RUN)
        assert code == 1
        assert re.search(f"the figure a_figure could not be drawn: .*{reason}", err.splitlines()[-1])
        assert "+33.3%" in out


#: lines of a shell, of which PYTHON is spbench, what they leave in standard error, and the exit code
SURROUNDINGS = [
    ("PYTHON list clusters >&-", "standard output is closed", 2),
    ("PYTHON run --scenario x 2>&-", "", 2),
    ("mkdir gone && cd gone && rmdir ../gone && PYTHON list clusters", "the working directory is gone", 2),
    ("ulimit -v 600000 && PYTHON list strategies", "this process may use too little memory", 2),
]


@pytest.mark.parametrize(("line", "message", "code"), SURROUNDINGS, ids=[line for line, *_ in SURROUNDINGS])
def test_surroundings_that_do_not_do(tmp_path: Path, line: str, message: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "SPBENCH_CACHE": "off"}
    line = line.replace("PYTHON", f"{sys.executable} -m spbench")
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"spbench: {message}" if message else "")
    assert done.stderr.count("\n") == bool(message)


def test_verify(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    green = VerifyRow(
        strategy="tensor_parallel",
        model="bert-tiny",
        variant="",
        part="bert",
        size=2,
        mesh="tp2",
        dtype="fp64",
        batch=3,
        seq_len=24,
        status="green",
        error=1.5e-14,
        limit=1e-10,
        tensor="weight",
        rank=1,
    )
    asked: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def found(*rows: VerifyRow) -> None:
        def verify(*arguments: Any, **options: Any) -> Iterator[VerifyRow]:
            asked.append((*arguments, options))
            return iter(rows)

        monkeypatch.setattr("spbench.bench.verification.cases.verify", verify)

    found(green, replace(green, status="unsupported", error=None, limit=None, rank=None))
    code, out, err = spbench(
        "verify", "--strategy", "tensor_parallel", "--world-size", "2", "--dtype", "fp64,fp32"
    )
    default = {"backend": "legacy_ddp", "device": "cpu", "options": {}}
    assert asked == [(["tensor_parallel"], None, [2], ["fp64", "fp32"], None, default)]
    assert (code, "1.5e-14" in out, out.splitlines()[-1]) == (0, True, "1 green, 1 unsupported")
    assert "tensor_parallel bert-tiny bert N=2 fp64: green" in err
    wrong = replace(green, status="RED", error=float("inf"), verdict="so many words " * 20)
    found(green, wrong, wrong)
    code, out, _ = spbench("verify")
    assert (code, out.count("(1)")) == (1, 3)
    assert max(map(len, out.splitlines())) < 160
    assert asked[-1] == (None, None, [1, 2, 3, 4], ["fp64"], None, default)
    assert spbench("verify", "--backend", "ddp")[0] == 1
    assert asked[-1][-1] == default | {"backend": "ddp"}
    assert spbench("verify", "--pairs")[0] == 1
    assert {"megatron_sp+ulysses", "ulysses+ring_attention"} <= set(asked[-1][0])
    assert asked[-1][2] == [4]
    assert json.loads(spbench("verify", "--format", "json")[1])[1]["error"] is None
    found()
    assert spbench("verify")[1].splitlines()[-1] == "nothing to verify"


def test_lists(spbench: Run) -> None:
    code, out, _ = spbench("list")
    assert code == 0
    for name in ("scenarios:", "tensor_parallel", "ring_self_attention", "bert-large", "piz-daint-p100"):
        assert name in out
    assert spbench("list", "clusters")[1] in out


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


def test_help_and_listings_do_not_import_torch() -> None:
    code = """
import sys
from spbench.bench.cli import exit_code
for line in ("--help", "run --help", "list scenarios", "list clusters"):
    assert exit_code(line.split()) == 0
print(sorted({"torch", "pandas", "rich", "matplotlib"} & set(sys.modules)))
"""
    out, err = spawn("-c", code, stdout=subprocess.PIPE).communicate(timeout=60)
    assert out.splitlines()[-1] == "[]", err


@pytest.mark.parametrize("module", ["spbench.bench.cli", "click", "spbench.bench.declarations"])
def test_an_interrupt_of_the_first_imports_is_told_in_one_line(module: str) -> None:
    """At the import of the command line, in it, and as it begins."""
    code = f"""
import importlib.abc, sys
class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from spbench.__main__ import main
main()
"""
    process = spawn("-c", code)
    assert process.communicate(timeout=60)[1] == "spbench: interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_outputs_that_go_away(options: tuple[str, ...]) -> None:
    command = (*options, "-m", "spbench.bench.cli", "list", "clusters")
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn(*command, stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141
    with open("/dev/full", "w") as full:
        process = spawn(*command, stdout=full)
        err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (2, "spbench: standard output: No space left on device\n")


def test_what_a_cluster_sets_for_all_processes_is_no_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a command would wait for a rank 0 that nobody has started."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("spbench ")
