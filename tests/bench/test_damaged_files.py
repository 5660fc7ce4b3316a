"""Damaged files of results: one line and exit code 2, or what is worse is named; never a traceback.

SPBENCH_FUZZ_EXAMPLES=5000 tries that many damages of each kind of file in place of a few.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.verify.verdicts import read_verdicts
from spbench.bench.tools.changes.records import content_of
from tests.tools.changes.records import cell, commit, record
from tests.tools.changes.rows import CLAIM, commit_all, folder, made_up

EXAMPLES = int(os.environ.get("SPBENCH_FUZZ_EXAMPLES", "0"))
few = settings(
    max_examples=EXAMPLES or 12,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

#: what may stand where something else belongs, as JSON
WRONG = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1",
    "true",
    '"5"',
    "null",
    "[]",
    "{}",
    '"=1+1"',
    "1" + "0" * 400,
)
#: those of them that are no number of a metric
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "true", '"5"', "[]", "{}", '"=1+1"')
SEEDS = st.integers(0, 2**32 - 1)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values within one of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def replaced(line: str, path: tuple[Any, ...], text: str | None) -> str:
    """A line of JSON with another text in the place of one value, or without it (None)."""
    content = json.loads(line)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    if text is None:
        del holder[path[-1]]
        return json.dumps(content)
    holder[path[-1]] = "@"
    return json.dumps(content).replace('"@"', text)


def damaged(text: str, chance: random.Random) -> bytes:
    """A text after one to three damages: of values, where it is lines of JSON, of lines, and of bytes."""
    for _ in range(chance.randint(1, 3)):
        lines = text.splitlines(keepends=True) or [""]
        at = chance.randrange(len(lines))
        kind = chance.randrange(4)
        if kind == 0 and lines[at].startswith("{"):
            try:
                path = chance.choice(list(places(json.loads(lines[at]))))
            except (ValueError, IndexError):
                continue
            lines[at] = replaced(lines[at], path, chance.choice([None, *WRONG])) + "\n"
        elif kind == 1:
            lines[at : at + 1] = chance.choice([[], [lines[at]] * 2, [lines[at][: chance.randrange(99)]]])
        elif kind == 2:
            words = lines[at].replace(",", " , ").replace(":", " : ").split(" ")
            words[chance.randrange(len(words))] = chance.choice(WRONG)
            lines[at] = " ".join(words)
        else:
            place = chance.randrange(len(lines[at]) + 1)
            lines[at] = (
                lines[at][:place] + chr(chance.choice([0, 10, 34, 39, 44, 61, 123, 233])) + lines[at][place:]
            )
        text = "".join(lines)
    content = text.encode()
    if chance.random() < 0.2:
        place = chance.randrange(len(content) + 1)
        content = content[:place] + bytes([chance.randrange(256)]) + content[place + chance.randrange(3) :]
    return content


def ran(*words: object) -> int:
    """The exit code of a command that may be refused, in one line, and must not break."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code([str(word) for word in words])
    said = out.getvalue() + err.getvalue()
    assert code in (0, 1, 2), said
    assert "Traceback" not in said
    if code == 2 and not out.getvalue():
        assert err.getvalue().count("\n") == 1, said
    return code


ROWS = [
    made_up("a"),
    made_up("b", engine="distributed"),
    made_up("c", answer=4096) | {"cell": made_up("")["cell"] | {"search": {"quantity": "seq_len"}}},
    made_up("d", "failed"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("base") / "suite", ROWS, CLAIM)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options of `spbench record` that say which commit was measured."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "code.py").write_text("")
    return "--commit", commit_all(repository), "--repository", str(repository)


@pytest.fixture(scope="module")
def spoilt(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    """Results like the base, of whose files one is replaced."""
    place = tmp_path_factory.mktemp("spoilt") / "suite"

    def spoil(name: str, content: bytes) -> Path:
        shutil.copytree(base, place, dirs_exist_ok=True)
        (place / name).write_bytes(content)
        return place

    return spoil


@few
@given(seed=SEEDS, name=st.sampled_from(["cells.jsonl", "comparison.csv"]))
def test_results(
    base: Path, spoilt: Callable[[str, bytes], Path], named: tuple[str, ...], seed: int, name: str
) -> None:
    chance = random.Random(seed)
    place = spoilt(name, damaged((base / name).read_text(), chance))
    ran("compare", base, place)
    ran("compare", place, base)
    system = chance.choice(SYSTEMS)
    output = place.parent / "out"
    export = ("export", "--to", system, place, "--output", output / system)
    kept = ("record", place, "--history", output / "history", *named)
    ran(*chance.choice([export, (*export, "--base", base), kept]))


#: what results are exported to
SYSTEMS = ("markdown", "junit", "hud", "github-action", "pytest-benchmark")

JUDGED = ("peak_memory_bytes", "reserved_memory_bytes", "step_time_s", "tokens_per_s", "answer", "sent_bytes")
PATHS = [
    (number, path)
    for number, row in enumerate(ROWS)
    for path in places(row)
    if path[-1] in JUDGED and not isinstance(path[-1], int)
]


@few
@given(place=st.sampled_from(PATHS), text=st.sampled_from(NO_NUMBERS))
def test_no_number_is_never_a_silent_success(
    base: Path,
    spoilt: Callable[[str, bytes], Path],
    named: tuple[str, ...],
    place: tuple[int, tuple[Any, ...]],
    text: str,
) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[place[0]] = replaced(lines[place[0]], place[1], text)
    results = spoilt("cells.jsonl", "\n".join(lines).encode())
    assert ran("compare", base, results) in (1, 2)
    assert ran("compare", results, base) == 2
    assert ran("record", results, "--history", results / "history", *named) == 2


def write_history(place: Path) -> dict[str, str]:
    """Three records, a target and a change that was meant; returns the texts of the files."""
    place.mkdir(exist_ok=True)
    cells = [cell("a", sent_bytes=7), cell("b", exact=False, step_time_s=[0.1, 0.3, 0.2])]
    texts = {
        **{f"{number}.jsonl": content_of(record(number, *cells)) for number in (1, 2)},
        "record.jsonl": content_of(record(3, *cells)),
        "targets.yaml": "targets:\n  - {suite: nightly, cell: a, metric: sent_bytes, value: 12}\n",
        "meant.yaml": f"meant:\n  - {{commit: '{commit(2).short}', metric: sent_bytes, reason: more}}\n",
    }
    for file, text in texts.items():
        (place / file).write_text(text)
    return texts


@few
@given(seed=SEEDS, name=st.sampled_from(["record.jsonl", "targets.yaml", "meant.yaml"]))
def test_histories(tmp_path_factory: pytest.TempPathFactory, seed: int, name: str) -> None:
    place = tmp_path_factory.getbasetemp() / "damaged_history"
    texts = write_history(place)
    (place / name).write_bytes(damaged(texts[name], random.Random(seed)))
    ran("history", place, "--fail-on-regression")


def write_verdicts(place: Path) -> str:
    """Two verdicts; returns the text of their file."""
    place.mkdir(exist_ok=True)
    head = {"backend": "gloo", "device": "cpu", "commit": "0", "code": "1", "torch": "2", "time": "now"}
    case = {"strategy": "s", "model": "m", "part": "p", "size": 1, "dtype": "float64", "status": "ok"}
    numbers = {"error": 1e-12, "limit": 1e-10, "rank": 0, "batch": 2}
    text = "".join(json.dumps(line) + "\n" for line in (head, case | numbers, case))
    (place / "verdicts.jsonl").write_text(text)
    return text


def test_what_is_not_damaged_is_taken(base: Path, named: tuple[str, ...], tmp_path: Path) -> None:
    """So that what the others find refused is refused for its damage."""
    assert ran("compare", base, base) == 0
    for system in SYSTEMS:
        assert ran("export", "--to", system, base, "--output", tmp_path / system, "--base", base) == 0
    assert ran("record", base, "--history", tmp_path / "kept", *named) == 0
    write_history(tmp_path / "history")
    assert ran("history", tmp_path / "history", "--fail-on-regression") == 0
    write_verdicts(tmp_path / "verdicts")
    assert [verdict["error"] for verdict in read_verdicts(tmp_path / "verdicts")] == [1e-12, None]


@few
@given(seed=SEEDS)
def test_verdicts(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    place = tmp_path_factory.getbasetemp() / "damaged_verdicts"
    text = write_verdicts(place)
    (place / "verdicts.jsonl").write_bytes(damaged(text, random.Random(seed)))
    try:
        verdicts = read_verdicts(place)
    except UserError:
        return
    for verdict in verdicts:
        assert all(verdict[name] is None or 0 <= verdict[name] < 1e300 for name in ("error", "limit"))
