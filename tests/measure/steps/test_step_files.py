"""The training steps of tests/examples/steps need torch only: they run where spbench cannot be imported."""

import subprocess
import sys
from pathlib import Path

from tests.grid import data

EXAMPLES = Path(__file__).parents[2] / "examples" / "steps"

#: runs each file's step twice on a single rank; its arguments are the files
ALL_STEPS = data(__file__)["ALL_STEPS"]


def test_the_steps_run_without_spbench():
    files = sorted(str(path) for path in EXAMPLES.glob("*.py"))
    command = [sys.executable, "-I", "-W", "ignore", "-c", ALL_STEPS, *files]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert lines.returncode == 0, lines.stderr
    losses = [tuple(map(float, line.split()[1:])) for line in lines.stdout.splitlines()]
    assert len(losses) == len(files)
    assert all(second < first for first, second in losses)
