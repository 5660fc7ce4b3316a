"""Commands in a pseudo-terminal, as a person sees them: no broken word, no line past the edge, few lines.

What a terminal shows of outputs: what has room, what is below, what is named as not shown.

Progress: one line on a terminal, a line a tenth elsewhere, nothing with --quiet, and faults always.
"""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from spbench.bench.command_line.output import Output, Table, View, wrapped
from spbench.bench.command_line.progress import Progress, message, remark, silence
from spbench.bench.tools.run.listed_classes import FOLDED
from tests.grid import data
from tests.slow import mostly_slow
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
from tests.tools.texts import hold

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
