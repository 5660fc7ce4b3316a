"""Fourteen thousand damaged inputs: each is taken, or refused in one line of a bounded length; none hangs.

`pytest -m slow tests/bench/test_hostile_inputs.py -s` prints a table by kind; by default a few are tried.
"""

import io
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.verdicts import VERDICTS_FILE, read_verdicts
from spbench.impls.loose_files import LOOSE_FILES
from tests.bench.damage import NO_NUMBERS, ROWS, TEXTS, damaged, places, replaced
from tests.bench.hostile import _DRY, KINDS, SYSTEMS, Case, as_json, case, history_files
from tests.tools.changes.rows import CLAIM, commit_all, folder

LONGEST_S = 30
#: characters of a message: lists of known names are long, and what it repeats of an input is not
MOST_CHARACTERS, MOST_OF_A_WORD = 2500, 300


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Inside, a hang is a failure."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"a hang of more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
    _, faults, _ = tried(kind, range(6), tmp_path)
    assert faults == []


@pytest.mark.slow
def test_fourteen_thousand(tmp_path: Path) -> None:
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


# -- what is refused is refused for its damage, and a number that is none never passes ---------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", ROWS, CLAIM)


@pytest.fixture
def named(tmp_path: Path) -> tuple[str, ...]:
    """The options of `spbench record` that say which commit was measured."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "code.py").write_text("")
    return "--commit", commit_all(repository), "--repository", str(repository)


def ran(*words: object) -> int:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return exit_code([str(word) for word in words])


def test_what_is_not_damaged_is_taken(base: Path, named: tuple[str, ...], tmp_path: Path) -> None:
    assert ran("compare", base, base) == 0
    for system in SYSTEMS:
        assert ran("export", "--to", system, base, "--output", tmp_path / system, "--base", base) == 0
    assert ran("record", base, "--history", tmp_path / "kept", *named) == 0
    whole = {name: text.encode() for name, text in TEXTS.items()}
    laid_out(Case({**history_files(), **whole}, ()), tmp_path)
    with chdir(tmp_path):
        assert ran("history", "h", "--fail-on-regression") == 0
        assert ran(*_DRY) == 0


JUDGED = ("peak_memory_bytes", "reserved_memory_bytes", "step_time_s", "tokens_per_s", "answer", "sent_bytes")
PATHS = [
    (number, path)
    for number, row in enumerate(ROWS)
    for path in places(row)
    if path[-1] in JUDGED and not isinstance(path[-1], int)
]


def test_no_number_is_never_a_silent_success(base: Path, named: tuple[str, ...], tmp_path: Path) -> None:
    for number, path in random.Random(1).sample(PATHS, 6):
        lines = [json.dumps(row) for row in ROWS]
        text = NO_NUMBERS[(number + len(path)) % len(NO_NUMBERS)]
        lines[number] = replaced(lines[number], path, text)
        spoilt = folder(tmp_path / "spoilt", ROWS, CLAIM)
        (spoilt / "cells.jsonl").write_text("\n".join(lines))
        assert ran("compare", base, spoilt) in (1, 2), (number, path, text)
        assert ran("compare", spoilt, base) == 2, (number, path, text)
        assert ran("record", spoilt, "--history", tmp_path / "history", *named) == 2, (number, path, text)


@pytest.mark.parametrize("seed", range(12))
def test_verdicts(tmp_path: Path, seed: int) -> None:
    head = {"backend": "gloo", "device": "cpu", "commit": "0", "code": "1", "torch": "2", "time": "now"}
    one = {"strategy": "s", "model": "m", "part": "p", "size": 1, "dtype": "float64", "status": "green"}
    numbers = {"error": 1e-12, "limit": 1e-10, "rank": 0, "batch": 2}
    file, text = tmp_path / VERDICTS_FILE, "".join(json.dumps(x) + "\n" for x in (head, one | numbers, one))
    file.write_text(text)
    assert [verdict["error"] for verdict in read_verdicts(tmp_path)] == [1e-12, None]
    file.write_bytes(damaged(text, random.Random(seed)))
    try:
        verdicts = read_verdicts(tmp_path)
    except UserError:
        return
    for verdict in verdicts:
        assert all(verdict[name] is None or 0 <= verdict[name] < 1e300 for name in ("error", "limit"))
