"""The command line: exit codes; for what a user can get wrong 2, and one short line with what, where, how.
Commands in a pseudo-terminal, as a person sees them: no broken word, no line past the edge, few lines. What
a terminal shows of outputs: what has room, what is below, what is named as not shown. Progress: one line on
a terminal, a line a tenth elsewhere, nothing with --quiet, and faults always.
"""

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

from spbench.bench.command_line.cli import cli, exit_code, main
from spbench.bench.command_line.drawn_tables import Share, new_bar
from spbench.bench.command_line.output import Output, Table, View, wrapped
from spbench.bench.command_line.progress import Progress, message, remark, silence
from spbench.bench.measure.sweep.results import RESULTS_FILE
from spbench.bench.tools.run.listed_classes import FOLDED
from tests.bench.fakes import SCENARIO
from tests.grid import data
from tests.slow import mostly_slow, slow
from tests.terminal import (
    ROOT,
    WIDTHS,
    Terminal,
    faults,
    faults_of,
    plain,
    run_in_a_terminal,
    screen_of,
    words_of,
)
from tests.tools.calibrate.test_logs import SAMPLES
from tests.tools.changes.records import nightly
from tests.tools.changes.rows import BASE, folder, made_up
from tests.tools.commands import test_history
from tests.tools.commands.conftest import Run
from tests.tools.texts import hold

RUN = ("run", "--scenario", "small.yaml")


def test_internal_errors_have_a_code_of_their_own(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep_cells", lambda *_, **__: 1 / 0)
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

        monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep_cells", sweep)
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


def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SPBENCH_COMPLETE", "bash_complete")
    for words, completed in (("spbench fi", "plain,fit"), ("spbench doctor --che", "plain,--check")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert (exit_code([]), capsys.readouterr()) == (0, (f"{completed}\n", ""))


#: options that decorators take, and what they give the command's body for them
TAKEN = {
    "asked": {"all_variants", "fresh", "jobs", "paper", "write"},
    "options": {
        *("batch", "cp", "dp", "pp", "seq_len", "sp", "tp"),
        *("changes", "cluster", "given", "gpus", "micro_batch", "strategy", "variant", "where"),
    },
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


SPBENCH = [sys.executable, "-m", "spbench"]
#: command lines with the lines that their answers have at the most on a screen of 80 columns
QUICK = [("list cluster l20", 60)]
SLOW = data(__file__)["SLOW"]


@pytest.mark.parametrize("width", mostly_slow((80, 120), 80))
@pytest.mark.parametrize(("line", "most_lines"), QUICK)
def test_quick_commands(line: str, most_lines: int, width: int, tmp_path: Path) -> None:
    check(line, most_lines, width, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("line", "most_lines"), SLOW)
def test_all_commands(line: str, most_lines: int, width: int, tmp_path: Path) -> None:
    check(line, most_lines, width, tmp_path)


def check(line: str, most_lines: int, width: int, folder: Path) -> None:
    """Run a command in a pipe, which gives its words, and in a terminal."""
    for name in ("scenarios", "results"):
        (folder / name).mkdir()
    (folder / "results" / "baseline").symlink_to(ROOT / "results" / "baseline")
    command = [*SPBENCH, *line.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert piped.returncode == 0, piped.stderr
    code, screen = run_in_a_terminal(command, width, folder)
    assert code == 0, screen
    known = words(piped.stdout) | words(FOLDED)  # what a screen counts and a pipe lists
    assert not (found := faults(screen, width, known, most_lines)), "\n".join([*found, screen])


def words(markdown: str) -> set[str]:
    """The words of what a pipe gets, without the lines of its tables; of paths also folder and name, which a
    screen has apart."""
    found = set(markdown.replace("|", " ").split())
    found |= {part for word in found if "/" in word for part in os.path.split(word)}
    stripped = {word.rstrip(",;:") for word in found}
    return found | stripped | {word + end for word in stripped for end in ",:"}


NAMES = ("ulysses+ring_attention", "tensor_parallel", "all_gather_kv")
NUMBERS = ("peak GiB", "reserved GiB", "tokens/s", "sent MiB/GPU", "exposed", "imbalance", "by formula")
LINES = [
    {
        "strategy": name,
        "GPUs": 64,
        **{number: f"{10_000 * at + row:.2f}" for at, number in enumerate(NUMBERS)},
        "cluster": "dgx-h100",
        "reason": "61.3 GiB more than the card has for tensors, at the end of the first backward pass"
        if name == "tensor_parallel"
        else None,
    }
    for row, name in enumerate(NAMES)
]
TABLE = Table("Times of steps", LINES, ("strategy", "by formula"), ("reason",))


@pytest.mark.parametrize("view", [View(), View(wide=True), View(details=True)], ids=str)
def test_no_word_is_broken_at_any_width(view: View) -> None:
    text = "a sentence that is longer than a screen of so many columns is broken between its words, " * 2
    assert faults_of(Output([TABLE, text], notes=[text]), view=view) == []


def test_the_check_finds_what_it_is_for() -> None:
    """Pieces of words as columns leave them that are folded, a long line, and too many lines."""
    words = words_of(Output([TABLE]))
    assert faults("strategy\nulysses+ring_att\nention", 80, words) == [
        "a broken word: 'ulysses+ring_att'",
        "a broken word: 'ention'",
    ]
    assert faults(screen_of(Output([TABLE]), 120), 80, words)[0].startswith("past the edge: ")
    assert faults("GPUs\n" * 5, 80, words, most_lines=4) == ["5 lines, at most 4 are wanted"]


def test_a_number_stays_with_its_unit() -> None:
    lines = wrapped("an exchange of +1.45 GiB in 0.06 s, of 8 ranks", 20)
    assert lines == ["an exchange of", "+1.45 GiB in 0.06 s,", "of 8 ranks"]


def test_columns_have_room_in_the_order_of_their_importance() -> None:
    """The last of the numbers comes before the others, and a name of several words takes several lines."""
    hold(Path(__file__).parent / "texts" / "table_at_80", screen_of(Output([TABLE]), 80))


def test_wide_shows_the_other_columns_below_each_row() -> None:
    below = screen_of(Output([TABLE]), 80, View(wide=True))
    assert "not shown" not in below
    assert "    imbalance: 50001.00\n    reason: 61.3 GiB" in below


def test_lines_that_a_terminal_counts_instead() -> None:
    folded = {0: "no attention", 2: "no attention"}
    many = Output([Table("Many", [*LINES, *LINES, *LINES], folded=folded, most=3)], details=[TABLE])
    shown = screen_of(many, 120)
    assert shown.count("ulysses+ring_attention") == 1
    assert "2 more: no attention\n4 more rows; --details shows all\n" in shown
    assert shown.endswith("\n\n--details shows: Times of steps\n")
    whole = screen_of(many, 120, View(details=True))
    assert whole.count("ulysses+ring_attention") == 4
    assert "--details" not in whole


def test_a_first_column_without_room_stands_below() -> None:
    """Even where it is all that differs."""
    lines = [{"cell": f"{number}{'/part' * 30}", "fits": "yes"} for number in range(2)]
    assert screen_of(Output([Table("Cells", lines)]), 80).splitlines() == [
        "Cells",
        "in each row: fits yes",
        *("    cell:", f"      0{'/part' * 30}"),
        *("    cell:", f"      1{'/part' * 30}"),
    ]


STEPS = 100


def work(steps: int = STEPS, fault: int | None = None) -> None:
    with Progress() as progress:
        progress.expect(steps)
        for number in range(1, steps + 1):
            progress.now(f"case {number}")
            progress.step(f"case {number}: green", is_fault=number == fault)


def test_elsewhere_it_is_a_line_a_tenth_and_one_for_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    work(fault=3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[3/100] case 3: green",
        *(f"[{number}/100] case {number}: green" for number in range(10, 101, 10)),
    ]
    work(steps=3)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_share_is_told_where_steps_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for share in (0.05, 0.3, 0.35, 0.3, 1.0):
            progress.at("looking", share)
    assert capsys.readouterr().err.splitlines() == ["[30%] looking", "[100%] looking"]


def test_the_time_left_counts_down_until_the_share_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, bar, shown = [0.0], new_bar(), []
    monkeypatch.setattr(bar, "get_time", lambda: seconds[0])
    bar.add_task("looking", total=1.0)
    (task,) = bar.tasks
    for seconds[0], share in ((10.0, 0.25), (20.0, 0.25), (45.0, 0.25), (46.0, 0.5)):
        bar.update(task.id, completed=share)
        shown.append(str(Share().render(task)))
    assert shown == ["25%, 30 s left", "25%, 20 s left", "25%", "50%, 46 s left"]


def test_on_a_terminal_it_is_one_line_but_for_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for fault in (None, 3):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        work(fault=fault)
        shown[fault] = plain(terminal.getvalue())
    assert "100%, 0 s left" in shown[None]
    assert "green" not in shown[None]
    assert shown[3].count("\n") == shown[None].count("\n") + 1
    assert shown[None].count("\n") <= 1
    assert "[3/100] case 3: green" in shown[3]


def test_quiet_shows_faults_and_messages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("any")) as context:
        silence(context, click.Option(["--quiet"]), True)
        work(fault=3)
        remark("what is about to be done")
        message("a warning")
    assert capsys.readouterr().err.splitlines() == ["[3/100] case 3: green", "a warning"]
