"""Recorded tests are left out of the default run alone, on the code on which they were green."""

import ast
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import recorded
from tests.grid import data

RECORD: dict[str, Any] = json.loads(recorded.RECORD.read_text())
FILES = {group: each["files"] for group, each in RECORD.items()}
ALL = FILES["instrument"]
#: by group, modules that its files may not import
OTHERS = {
    "instrument": ("spbench.api", "bench.tools", "bench.command_line", "spbench.plots", "tests.tools"),
    "tools": ("tests.docs", "tests.scripts", "tests.api"),
}


@cache
def modules_of(file: Path) -> set[str]:
    """The modules that a file of tests imports, by way of other files of tests too."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    named = {f"{n.module}.{each.name}" for n in nodes if isinstance(n, ast.ImportFrom) for each in n.names}
    named |= {each.name for n in nodes if isinstance(n, ast.Import) for each in n.names}
    places = {recorded.TESTS.parent / each.replace(".", "/") for each in named if each.startswith("tests.")}
    helpers = {at.with_suffix(".py") if at.with_suffix(".py").exists() else at.parent for at in places}
    further = {path if path.suffix else path.with_suffix(".py") for path in helpers} - {file}
    return named.union(*(modules_of(path) for path in further if path.is_file()))


def test_recorded_files_import_what_the_digest_has() -> None:
    for group, names in FILES.items():
        read = {*recorded.read_files(recorded.TESTS.parent, group)}
        for path in (recorded.TESTS / name for name in names):
            assert path in read
            assert not [m for m in modules_of(path) if any(other in m for other in OTHERS[group])], path
            # the package's public names may be of tools
            assert group == "tools" or "spbench" not in modules_of(path), path


def test_other_code_is_another_digest(tmp_path: Path) -> None:
    code, tool, run = map(tmp_path.joinpath, ("impls/ring.py", "bench/tools/fit.py", "results/runs/a.csv"))
    for path in (code, tool, run):
        path.parent.mkdir(parents=True)
        path.write_text("hops = 1")
    instrument, tools = (recorded.digest.__wrapped__(group, tmp_path) for group in recorded.READ)
    assert run not in recorded.read_files(tmp_path, "tools")
    tool.write_text("hops = 2")
    code.write_text("hops = 1  # a comment")
    assert recorded.digest.__wrapped__("instrument", tmp_path) == instrument
    assert recorded.digest.__wrapped__("tools", tmp_path) != tools
    code.write_text("hops = 2")
    assert recorded.digest.__wrapped__("instrument", tmp_path) != instrument


@pytest.mark.parametrize("changed", ["", "code", "path", "mark", "word"])
def test_what_leaves_files_out(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "other" if changed == "code" else "this"
    record = {"instrument": {"files": ALL, "code": code}, "tools": {"files": ["x.py"], "code": "older"}}
    (tmp_path / "recorded.json").write_text(json.dumps(record))
    monkeypatch.setattr(recorded, "RECORD", tmp_path / "recorded.json")
    monkeypatch.setattr(recorded, "digest", lambda group: "this")
    sources = pytest.Config.ArgsSource
    source = sources.ARGS if changed == "path" else sources.TESTPATHS
    config: Any = SimpleNamespace(args_source=source, ArgsSource=sources, stash=pytest.Stash())
    mark, word = "slow" if changed == "mark" else "not slow", "ring" if changed == "word" else ""
    config.option = SimpleNamespace(markexpr=mark, keyword=word)
    recorded.pytest_configure(config)
    ignored = [name for name in ALL if recorded.pytest_ignore_collect(recorded.TESTS / name, config)]
    assert len(ignored) == (0 if changed else len(ALL) - recorded.DRAWN_FILES)


def test_each_file_of_tests_is_in_one_shard() -> None:
    shards = data(recorded.TESTS / "shards.yaml").values()
    places = [recorded.TESTS.parent / each for shard in shards for each in shard.split()]
    assert len(shards) == 4
    for path in recorded.TESTS.rglob("test_*.py"):
        assert sum(path.is_relative_to(place) for place in places) == 1, path
