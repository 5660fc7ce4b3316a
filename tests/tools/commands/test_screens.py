"""Commands in a pseudo-terminal, as a person sees them: no broken word, no line past the edge, few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spbench.bench.tools.run.listed_classes import FOLDED
from tests.slow import mostly_slow
from tests.terminal import ROOT, WIDTHS, faults, run_in_a_terminal

SPBENCH = [sys.executable, "-m", "spbench"]
#: command lines with the lines that their answers have at the most on a screen of 80 columns
QUICK = [("list cluster l20", 60)]
SLOW = [
    ("list", 30),
    ("list models", 85),
    ("list models qwen3", 60),
    ("list strategies mega", 10),
    ("list cluster dgx-h100", 70),
    ("run --scenario gate --dry-run --strategy lasp", 30),
    ("run --scenario max_seqlen --jobs 2", 45),
    ("compare results/baseline/gate results/baseline/gate", 5),
    ("verify --strategy lasp --model linear-transformer-tiny --world-size 2 --part attention", 10),
    ("fit llama3-8b --cluster dgx-h100 --gpus 8 --strategy ulysses --sp 8 --seq-len 128K", 50),
    (
        "advise --model llama3-8b --cluster dgx-h100 --gpus 8 --seq-len 32K --only ulysses,zero3 "
        "--fixed dp=1,pp=1",
        40,
    ),
    ("doctor", 80),
]


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
