"""The command line: exit codes; for what a user can get wrong 2, and one short line with what, where, how."""

import errno
import importlib
import inspect
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from spbench.bench.command_line.cli import cli, main
from spbench.bench.measure.sweep.results import RESULTS_FILE
from tests.bench.fakes import SCENARIO
from tests.slow import slow
from tests.tools.calibrate.test_logs import SAMPLES
from tests.tools.changes.records import nightly
from tests.tools.changes.rows import BASE, folder, made_up
from tests.tools.commands import test_history
from tests.tools.commands.conftest import Run

RUN = ("run", "--scenario", "small.yaml")


def test_internal_errors_have_a_code_of_their_own(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep", lambda *_, **__: 1 / 0)
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

        monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep", sweep)
        code, _, err = spbench(*RUN)
        return code, err.splitlines()[-1]

    code, said = failing(OSError(errno.EMFILE, "Too many open files"))
    assert (code, "Too many open files" in said, "standard output" in said) == (70, True, False)
    code, said = failing(BrokenPipeError(errno.EPIPE, "Broken pipe"))  # of a pipe to another process
    assert (code, "Broken pipe" in said) == (70, True)
    code, said = failing(OSError(errno.ENOSPC, "No space left on device", "some.file"))
    assert (code, said) == (2, "spbench: cannot write some.file: No space left on device")


#: lines of a shell, of which PYTHON is spbench, what they leave in standard error, and the exit code
SURROUNDINGS = [
    ("PYTHON list clusters >&-", "standard output is closed", 2),
    slow("PYTHON run --scenario x 2>&-", "", 2),
    ("mkdir gone && cd gone && rmdir ../gone && PYTHON list clusters", "the working directory is gone", 2),
    ("ulimit -v 400000 && PYTHON list strategies", "this process may use too little memory", 2),
]


@pytest.mark.parametrize(("line", "message", "code"), SURROUNDINGS)
def test_surroundings_that_do_not_do(tmp_path: Path, line: str, message: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "SPBENCH_CACHE": "off"}
    line = line.replace("PYTHON", f"{sys.executable} -m spbench")
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"spbench: {message}" if message else "")
    assert done.stderr.count("\n") == bool(message)


def test_lists(spbench: Run) -> None:
    code, out, _ = spbench("list")
    assert code == 0
    for name in ("scenarios:", "tensor_parallel", "ring_self_attention", "bert-large", "piz-daint-p100"):
        assert name in out
    assert spbench("list", "clusters")[1] in out
    (of_8b,) = (line for line in out.splitlines() if line.strip().startswith("llama3-8b "))
    assert "layers 32, hidden 4096" in of_8b
    assert "experts" not in of_8b  # which it has not, whatever their number a token would be


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


def test_help_and_listings_do_not_import_torch() -> None:
    code = """
import sys
from spbench.bench.command_line.cli import COMMANDS, exit_code
lists = [f"list {kind}" for kind in ("scenarios", "clusters", "figures")]
for line in ("--help", *(f"{name} --help" for name in COMMANDS.names()), *lists):
    assert exit_code(line.split()) == 0
print(sorted({"torch", "pandas", "rich", "matplotlib"} & set(sys.modules)))
"""
    out, err = spawn("-c", code, stdout=subprocess.PIPE).communicate(timeout=60)
    assert out.splitlines()[-1] == "[]", err


@pytest.mark.parametrize("module", ["spbench.bench.command_line.cli", "click", "spbench.bench.errors"])
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_outputs_that_go_away(options: tuple[str, ...]) -> None:
    command = (*options, "-m", "spbench.bench.command_line.cli", "list", "clusters")
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


#: options that decorators take, and what they give the command's body for them
TAKEN = {
    "asked": {"all_variants", "fresh", "jobs", "paper", "write"},
    "sizes": {"batch", "cp", "dp", "pp", "seq_len", "sp", "tp"},
    "shape": {"batch", "cluster", "model", "seq_len", "strategy", "world_size"},
    "narrowing": {"changes", "placed", "variant", "where"},
}


@pytest.mark.parametrize("name", ["advise", "fit", "flags", "import", "reproduce", "trace", "verify"])
def test_a_body_has_the_parameters_that_its_command_gives(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    module, _, function = vars(command.callback)["body"].partition(":")
    body = getattr(importlib.import_module(f"spbench.bench.tools.{module}"), function)
    options = {parameter.name for parameter in command.params} - {"form", "wide", "details", "quiet"}
    parameters = {*inspect.signature(body).parameters}
    grouped = [taken for given, taken in TAKEN.items() if given in parameters]
    assert parameters - options <= {*TAKEN}
    assert options - parameters <= {"strategy"}.union(*grouped)


#: command lines, and words of the message
REFUSALS = Path(__file__).with_name("refusals.txt").read_text()
WRONG = [line.split(" -> ") for line in REFUSALS.splitlines() if line]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_user_errors_are_one_line(
    spbench: Run, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    Path("malformed.yaml").write_text("groups: [")
    Path("itself.yaml").write_text("a: &a [*a]\n")
    huge = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 99999999999999999999}"
    Path("huge.yaml").write_text(f"title: huge\ndefaults: {huge}\ngroups: [{{}}]\n")
    Path("negative.yaml").write_text(SCENARIO.replace("tp: [1, 2]", "tp: [1, -2]"))
    for name in ("traced.yaml", "flags.yaml"):
        shutil.copy(Path(__file__).with_name(name), name)
    Path("taken", RESULTS_FILE).mkdir(parents=True)
    Path("notes.txt").write_text("all_reduce was fast\n")
    shutil.copytree(SAMPLES, ".", dirs_exist_ok=True)
    if line.startswith("history"):
        nightly(Path("history"), 6, test_history.cells)
    if line.startswith("export"):
        for name in ("suite", "other/suite", "third", "bases/suite"):
            folder(Path(name), BASE)
        folder(Path("bare"), [made_up("a", "unsupported")])
    before = sorted(Path().rglob("*"))
    code, out, err = spbench(*("x " * 2000 if word == "LONG" else word for word in shlex.split(line)))
    *progress, last = err.splitlines()
    assert (code, out) == (2, "")
    assert last.startswith("spbench: ")
    assert message in last
    assert progress == [] or line.startswith("trace")
    assert len(last) < 600
    assert sorted(Path().rglob("*")) == before
