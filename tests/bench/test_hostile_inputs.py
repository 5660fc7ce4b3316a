"""Ten thousand damaged inputs: each is taken, or refused in one line of a bounded length; none hangs.

`pytest -m slow tests/bench/test_hostile_inputs.py -s` prints a table by kind; by default a few are tried.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections import Counter
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.impls.loose_files import LOOSE_FILES
from tests.bench.hostile import KINDS, Case, as_json, case
from tests.bench.test_damaged_inputs import at_most

LONGEST_S = 30
#: characters of a message: lists of known names are long, and what it repeats of an input is not
MOST_CHARACTERS, MOST_OF_A_WORD = 2500, 300


def laid_out(one: Case, folder: Path) -> None:
    """Write a case's files, and make its links and folders."""
    for name, content in one.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, kind in dict(one.special).items():
        path = folder / name
        if kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(path.name if kind == "loop" else "nothing-there")


def wrong(one: Case, folder: Path) -> tuple[int, str]:
    """The exit code of a case, and what is wrong with how it ended; "" if nothing is."""
    laid_out(one, folder)
    out, err = io.StringIO(), io.StringIO()
    files = os.environ.get(LOOSE_FILES, "")
    try:
        with chdir(folder), at_most(LONGEST_S), redirect_stdout(out), redirect_stderr(err):
            code = exit_code([*one.words])
    except BaseException as error:
        return -1, f"raised {type(error).__name__}: {error}"[:300]
    finally:
        os.environ[LOOSE_FILES] = files
    lines = err.getvalue().splitlines()
    if code not in (0, 1, 2) or "Traceback" in err.getvalue():
        return code, err.getvalue()[-300:]
    if code == 2 and not out.getvalue():
        if not lines or not lines[-1].startswith("spbench: "):
            return code, f"no message: {err.getvalue()[-300:]!r}"
        if len(lines[-1]) > MOST_CHARACTERS or max(map(len, lines[-1].split())) > MOST_OF_A_WORD:
            return code, f"a message of {len(lines[-1])} characters: {lines[-1][:300]}"
    return code, ""


def tried(kind: str, numbers: range, folder: Path) -> tuple[Counter[int], list[str], float]:
    """Exit codes, faults, and the longest time [s] of cases of a kind."""
    codes: Counter[int] = Counter()
    faults, longest = [], 0.0
    for number in numbers:
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with chdir(folder):
            one = case(kind, number)
        begin = time.perf_counter()
        code, problem = wrong(one, place)
        longest = max(longest, time.perf_counter() - begin)
        codes[code] += 1
        if problem:
            faults.append(f"{kind} {number}: {problem}\n    {as_json(one)[:1500]}")
    return codes, faults, longest


@pytest.mark.parametrize("kind", KINDS)
def test_a_few(kind: str, tmp_path: Path) -> None:
    _, faults, _ = tried(kind, range(2), tmp_path)
    assert faults == []


@pytest.mark.slow
def test_ten_thousand(tmp_path: Path) -> None:
    every: list[str] = []
    for kind, (_, count) in KINDS.items():
        codes, faults, longest = tried(kind, range(count), tmp_path)
        shown = ", ".join(f"{count} x exit {code}" for code, count in sorted(codes.items()))
        print(
            f"{kind:20} {count:6} cases: {shown}; {len(faults)} wrong; the longest {longest:.1f} s",
            flush=True,
        )
        every += faults
    assert every == [], "\n".join(every[:50])
