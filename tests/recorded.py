"""The test files of recorded.json, which were green on exactly this code: of their cases the default run has
a few, other ones for each state of the code.

Only a run that names no path, no word and no mark reads the record, so that `pytest tests` runs all. The
files are in two groups, because a change of tools does not reach the instrument. If the code that the files
of a group import, a table that they read, Python or torch is another one, all files of the group run.
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

#: by group, what its files may read. "instrument": the instrument, which imports neither commands nor tools
#: (api/test_rooms.py), scenarios and clusters, the tests of impls and the instrument, and the scripts and
#: modules that these run; "tools": all code and all results, but no pages
_OF_INSTRUMENT = (
    *("impls", "bench", "scenarios", "scripts", "tests/*.*"),
    *("tests/impls", "tests/measure", "tests/bench", "tests/examples", "tests/plugins"),
)
READ = {
    "instrument": _OF_INSTRUMENT,
    "tools": (*_OF_INSTRUMENT, "spbench", "plots", "results", "tests/tools", "tests/plots"),
}
_NEVER_READ = ("tests/recorded.json", "bench/measure/verify/proven.json", "results/runs")
_NOT_READ = {"instrument": ("bench/tools", "bench/command_line", *_NEVER_READ), "tools": _NEVER_READ}
_KINDS = {".py", ".pyi", ".yaml", ".json", ".csv", ".jsonl", ".sh", ".toml", ".txt"}


def read_files(root: Path, group: str) -> list[Path]:
    """The files below ``root`` that the recorded files of a group may read."""
    tops = [top for place in READ[group] for top in root.glob(place)]
    return [
        path
        for path in (each for top in tops for each in (top, *top.rglob("*")))
        if path.suffix in _KINDS and not any(path.is_relative_to(root / each) for each in _NOT_READ[group])
    ]


@cache
def digest(group: str, root: Path = TESTS.parent) -> str:
    """The digest of what recorded files of a group may read, without docstrings and comments, and the
    releases of Python and torch."""
    python, torch = platform.python_version_tuple(), version("torch").partition("+")[0]
    return f"{digest_of_files(root, read_files(root, group))} Python {python[0]}.{python[1]} torch {torch}"


@pytest.hookimpl(tryfirst=True)  # before the cache, which has digests of unchanged files, is another folder
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[LEFT_OUT] = config.workerinput["left_out"]
        return
    record = json.loads(RECORD.read_text())
    is_default = config.args_source == config.ArgsSource.TESTPATHS and config.option.markexpr == "not slow"
    green = [each for each in record if record[each]["code"] == digest(each)] if is_default else []
    left_out = [name for each in green for name in record[each]["files"]]
    config.stash[LEFT_OUT] = [] if config.option.keyword else left_out


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist, which sees other arguments."""
    node.workerinput["left_out"] = node.config.stash[LEFT_OUT]


def _draw() -> random.Random:
    return random.Random(digest("tools"))


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
