"""The scripts of .ci, with programs in the place of the real ones that write down how they are called."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

#: writes down its arguments; FAILING is a part of a call, and the exit code of such calls
PROGRAM = """#!/usr/bin/env bash
echo "$(basename "$0")${*:+ $*}" >> "$CALLS"
case "$* " in *"${FAILING% *} "*) exit "${FAILING##* }" ;; esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("pip", "pytest", "ruff", "mypy", "spbench", "python"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    return folder


def run(programs: Path, *command: str, failing: str = "nothing at all 0") -> tuple[int, list[str]]:
    """The exit code of a script of .ci and the calls that it makes, from a folder that is none of ours."""
    calls = programs / "calls"
    calls.write_text("")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CALLS": str(calls), "FAILING": failing}
    script = [str(ROOT / ".ci" / command[0]), *command[1:]]
    done = subprocess.run(
        script, cwd=programs.parent, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, calls.read_text().splitlines()


def commands_of_the_readme(marker: str) -> list[str]:
    """The commands under a marker, as the programs write them down."""
    block = README.split(f"<!-- {marker} command -->")[1].split("```")[1]
    return re.split(" && |; ", block.removeprefix("sh\n").strip().replace("'", ""))


@pytest.mark.parametrize(
    ("step", "marker", "count"),
    [("install", "test", 1), ("test", "test", 2), ("lint", "lint", 3), ("gate", "gate", 2)],
)
def test_a_step_is_the_readmes_command(programs: Path, step: str, marker: str, count: int) -> None:
    expected = commands_of_the_readme(marker)[:count]
    assert len(expected) == count
    assert run(programs, "run", step) == (0, expected)
    # a gate whose rows are wrong compares them too, and fails by either
    failing = expected if step == "gate" else expected[:1]
    for each in failing:
        assert run(programs, "run", step, failing=f"{each.split(' ', 1)[1]} 3") == (3, failing)


def test_steps_in_their_order(programs: Path) -> None:
    code, calls = run(programs, "run", "install", "lint", "same-numbers")
    assert code == 0
    assert [call.split()[0] for call in calls] == ["pip", "ruff", "ruff", "mypy", "python"]
    assert run(programs, "run", "same-numbers", failing="same_numbers.py 1")[0] == 1
    assert set(calls[-1].split()[2:]) < {path.stem for path in (ROOT / "results" / "frozen").glob("*.csv")}


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("--frozen 1", 1), ("--sample 1", 1)])
def test_a_night_judges_a_tenth_of_the_committed_mistakes(
    programs: Path, tmp_path: Path, failing: str, code: int
) -> None:
    ended, calls = run(programs, "mutations", str(tmp_path), failing=failing or "nothing at all 0")
    assert (ended, [call.split()[0] for call in calls]) == (code, ["python", "pytest", "python"])
    frozen = re.fullmatch(r"python scripts/mutations.py --frozen (\S+) --turn \d+", calls[0])
    assert (ROOT / frozen[1]).is_file()


def test_an_unknown_step(programs: Path) -> None:
    assert run(programs, "run", "lnit") == (2, [])


BASELINES = sorted(path.name for path in (ROOT / "results" / "baseline").iterdir())


def test_a_night_goes_through_all_baselines(programs: Path, tmp_path: Path) -> None:
    history, site = tmp_path / "history", tmp_path / "site"
    site.mkdir()
    code, calls = run(programs, "nightly", "history", "site", "runner")
    assert code == 0
    assert calls[:3] == [
        f"spbench run --scenario {BASELINES[0]} --fresh --output results/runs/{BASELINES[0]}",
        f"spbench compare results/baseline/{BASELINES[0]}/ results/runs/{BASELINES[0]}",
        f"spbench record results/runs/{BASELINES[0]} --history {history} --machine runner",
    ]
    runs = " ".join(f"results/runs/{name}" for name in BASELINES)
    assert calls[3 * len(BASELINES) :] == [
        f"spbench report --history {history} --output {site}",
        f"spbench history {history} --fail-on-regression",
        f"spbench export --to markdown {runs} --base results/baseline --output {site}/nightly.md",
        f"spbench export --to junit {runs} --base results/baseline --output {site}/junit.xml",
    ]
    assert len(BASELINES) >= 4


@pytest.mark.parametrize(
    "failing", ["compare results/baseline/gate/ results/runs/gate", "--fail-on-regression"]
)
def test_what_is_worse_is_the_exit_code_after_all_is_written(
    programs: Path, tmp_path: Path, failing: str
) -> None:
    (tmp_path / "site").mkdir()
    whole = run(programs, "nightly", "history", "site", "runner")[1]
    assert run(programs, "nightly", "history", "site", "runner", failing=f"{failing} 1") == (1, whole)


def test_what_is_broken_ends_the_night(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    code, calls = run(
        programs, "nightly", "history", "site", "runner", failing="--fresh --output results/runs/gate 2"
    )
    assert code == 2
    assert "run" in calls[-1]
    assert not [call for call in calls if "export" in call]
