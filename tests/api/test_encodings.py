"""Every text file is read and written in UTF-8, whatever the locale: Python's default is the locale's."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("bench", "impls", "plots", "scripts")
#: whose ``open`` makes no text of a file
_OTHERS = ("os", "Image", "gzip", "webbrowser")


def without_encoding(source: str) -> Iterator[int]:
    """The lines of calls that read or write a text and name no encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        owner = getattr(getattr(call.func, "value", None), "id", "")
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("read_text", "write_text") and (owner or isinstance(call.func, ast.Attribute)):
            yield call.lineno
        elif name == "open" and owner not in _OTHERS:
            words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
            modes = [word.value for word in words if isinstance(word, ast.Constant)]
            if not any(isinstance(mode, str) and {*mode} <= {*"rwxab+"} and "b" in mode for mode in modes):
                yield call.lineno


def test_what_is_found() -> None:
    assert [*without_encoding("p.read_text()\np.open('w')\nopen(x)\nf(y).write_text(z)\n")] == [1, 2, 3, 4]
    named = "p.read_text(encoding='utf-8')\np.open('rb')\nos.open(x, 1)\nread_text(p)\n"
    assert [*without_encoding(named)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_text_is_in_the_encoding_of_the_locale(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.slow
def test_a_command_in_the_plainest_locale(tmp_path: Path) -> None:
    """Its files have characters beyond ASCII, and so has what it prints."""
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    scenario = tmp_path / "s.yaml"
    cell = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 8}"
    scenario.write_text(f"title: größer ±3\ngroups:\n  - {cell}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "spbench", "run", str(scenario), "--dry-run", "--output", str(tmp_path)],
        env={**os.environ, **locale},
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfer \\xb13 (1 cells)" in done.stdout
