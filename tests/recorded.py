"""The test files of recorded.json, which were green on exactly this code: of their cases the default run has
a few, other ones for each state of the code.

Only a run that names no path, no word and no mark reads the record, so that `pytest tests` runs all. If the
code that these files import, a table that they read, Python or torch is another one, all of them run.
`python scripts/prove.py tests` runs the files, and writes the record.
"""

import json
import platform
import random
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.measured_code import digest_of_files

TESTS = Path(__file__).parent
RECORD = TESTS / "recorded.json"
#: the number of cases of recorded files that the default run has, and of files of which they are, because to
#: import all of the files takes seconds
DRAWN, DRAWN_FILES = 24, 4
#: the recorded files that this run leaves out but for a few cases
LEFT_OUT = pytest.StashKey[list[str]]()

#: what recorded files may read: the instrument, which imports neither commands nor tools (api/test_rooms.py),
#: scenarios and clusters, the tests of impls and the instrument, and the scripts and modules that these run
_READ = (
    *("impls", "bench", "scenarios", "scripts", "tests/*.*"),
    *("tests/impls", "tests/measure", "tests/bench", "tests/examples", "tests/plugins"),
)
_NOT_READ = ("bench/tools", "bench/command_line", "tests/recorded.json", "bench/measure/verify/proven.json")
_KINDS = {".py", ".pyi", ".yaml", ".json", ".csv"}


def read_files(root: Path) -> list[Path]:
    """The files below ``root`` that recorded files may read."""
    tops = [top for place in _READ for top in root.glob(place)]
    return [
        path
        for path in (each for top in tops for each in (top, *top.rglob("*")))
        if path.suffix in _KINDS and not any(path.is_relative_to(root / each) for each in _NOT_READ)
    ]


@cache
def digest(root: Path = TESTS.parent) -> str:
    """The digest of what recorded files may read, without docstrings and comments, and the releases of Python
    and torch."""
    python, torch = platform.python_version_tuple(), version("torch").partition("+")[0]
    return f"{digest_of_files(root, read_files(root))} Python {python[0]}.{python[1]} torch {torch}"


@pytest.hookimpl(tryfirst=True)  # before the cache, which has digests of unchanged files, is another folder
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[LEFT_OUT] = config.workerinput["left_out"]
        return
    record = json.loads(RECORD.read_text())
    is_default = config.args_source == config.ArgsSource.TESTPATHS and config.option.markexpr == "not slow"
    is_green = is_default and not config.option.keyword and record["code"] == digest()
    config.stash[LEFT_OUT] = record["files"] if is_green else []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist, which sees other arguments."""
    node.workerinput["left_out"] = node.config.stash[LEFT_OUT]


def _draw() -> random.Random:
    return random.Random(digest())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (left_out := config.stash[LEFT_OUT]) or not collection_path.is_relative_to(TESTS):
        return None
    drawn = _draw().sample(left_out, min(DRAWN_FILES, len(left_out)))
    return collection_path.relative_to(TESTS).as_posix() in {*left_out} - {*drawn} or None


@pytest.hookimpl(trylast=True)  # after slow tests are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {TESTS / name for name in config.stash[LEFT_OUT]}
    recorded = [item for item in items if item.path in left_out]
    drawn = {*_draw().sample(recorded, min(DRAWN, len(recorded)))}
    items[:] = [item for item in items if item.path not in left_out or item in drawn]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash[LEFT_OUT]:
        terminalreporter.write_line(
            f"{DRAWN} cases were drawn of {len(left_out)} files that were green on exactly this code "
            "(tests/recorded.json); pytest tests  runs all"
        )
