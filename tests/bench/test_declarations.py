"""Commands that only name things import no torch, and never show what the code declared before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spbench.bench.declarations import declared, kept_on_disk, state_of_code
from spbench.bench.disk_cache import CACHE_FOLDER, cache_folder
from spbench.bench.measure.processes import answering as answers
from spbench.bench.measure.processes.answering import answers_of_server
from spbench.bench.measure.scenarios import choices
from spbench.bench.tools.run import list_command as listing
from spbench.impls.loose_files import LOOSE_FILES

ROOT = Path(__file__).parents[2]
STRATEGY = """
import torch
import spbench

class Listed(spbench.Strategy):
    name = "listed"
    summary = "SUMMARY"
"""
#: prints, after what each command line prints, whether torch was imported
SEVERAL_COMMANDS = """
import sys
from spbench.bench.command_line.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        assert not end.code, end.code
    print("\\ntorch" if "torch" in sys.modules else "\\nno torch")
"""
DRY_RUN = "run --scenario gate --dry-run --format csv"
COMMANDS = ["--help", "run --help", "list --format json", "list strategies", DRY_RUN]


class Commands:
    """The command spbench beside an installed plug-in, with an empty folder for what is kept."""

    def __init__(self, folder: Path):
        self.folder, self.plugin = folder, folder / "site" / "listed_plugin.py"
        metadata = folder / "site" / "listed-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: listed\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[spbench.strategies]\nlisted = listed_plugin\n")
        self.plugin.write_text(STRATEGY.replace("SUMMARY", "what it was"))

    def run(self, *lines: str) -> str:
        """What one process prints that runs these command lines."""
        path = os.pathsep.join(map(str, (ROOT, self.folder / "site")))
        environment = {**os.environ, "PYTHONPATH": path, CACHE_FOLDER: str(self.folder / "cache")}
        command = [sys.executable, "-c", SEVERAL_COMMANDS, *lines]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.slow
def test_only_the_first_listing_imports_torch(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    first, second = commands.run(*COMMANDS), commands.run(*COMMANDS)
    assert "\ntorch\n" in first
    assert "\ntorch\n" not in second
    assert second.count("\nno torch\n") == len(COMMANDS)
    assert second == first.replace("\ntorch\n", "\nno torch\n")
    assert "what it was" in first


@pytest.mark.slow
def test_a_command_that_has_cells_run_asks_its_server(tmp_path: Path) -> None:
    assert Commands(tmp_path).run(DRY_RUN).endswith("\nno torch\n")


@pytest.mark.slow
def test_a_listing_never_shows_what_the_code_declared_before(tmp_path: Path) -> None:
    """In every run the state of the code is held to this, below."""
    commands = Commands(tmp_path)
    assert "what it was" in commands.run("list strategies")
    # as long as before, and on a disk that counts seconds the times of the file may be the same
    commands.plugin.write_text(STRATEGY.replace("SUMMARY", "what it is!"))
    assert "what it is!" in commands.run("list strategies")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where answers are kept; in this process torch looks as if it were not imported."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "torch")
    return tmp_path / "cache" / "declarations"


asked: list[str] = []


@declared
def _summary(name: str, options: dict[str, object]) -> str:
    asked.append(name)
    return f"the summary of {name}"


def ask(*names: str) -> list[str]:
    """What of these the code is asked for, in a command."""
    asked.clear()
    with kept_on_disk():
        for name in names:
            assert _summary(name, {"layers": 2}) == f"the summary of {name}"
    return asked.copy()


def test_an_answer_is_kept(folder: Path) -> None:
    assert ask("lasp", "lasp", "dsp") == ["lasp", "dsp"]
    assert ask("lasp", "dsp", "rsa") == ["rsa"]
    assert ask("rsa") == []
    assert len([*folder.glob("??/*")]) == 1


@declared
def _process(name: str, fails_elsewhere: int = 0) -> int:
    if fails_elsewhere not in (0, os.getpid()):
        raise KeyError(name)
    return os.getpid()


def test_a_process_of_the_server_answers(folder: Path) -> None:
    with kept_on_disk(), answers_of_server():
        first, second = _process("lasp"), _process("dsp")
        assert first == second != os.getpid()
        # what fails there, or is asked where torch has been imported, is asked here
        assert _process("rsa", os.getpid()) == os.getpid()
        sys.modules["torch"] = sys
        assert _process("lasp") == os.getpid()
    with kept_on_disk():
        del sys.modules["torch"]
        assert (_process("lasp"), _process("dsp")) == (os.getpid(), second)


def test_without_a_server_this_process_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "START_METHOD", "spawn")
    with kept_on_disk(), answers_of_server():
        assert _process("lasp") == os.getpid()


def test_outside_of_a_command_the_code_is_asked(folder: Path) -> None:
    ask("lasp")
    asked.clear()
    _summary("lasp", {"layers": 2})
    assert asked == ["lasp"]


def test_beside_files_of_the_users_the_code_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask("lasp")
    monkeypatch.setenv(LOOSE_FILES, "naive.py")
    assert ask("lasp", "lasp") == ["lasp", "lasp"]


def test_arguments_that_json_takes_for_the_same(folder: Path) -> None:
    with kept_on_disk():
        for options in ({"a": 1}, {"a": True}, {"a": 1.0}, {"a": "1"}):
            _summary("lasp", options)
    (file,) = folder.glob("??/*")
    assert len(json.loads(file.read_text())) == 4


def test_a_spoilt_file_or_folder_costs_time_alone(folder: Path) -> None:
    ask("lasp")
    (file,) = folder.glob("??/*")
    for content in ('{"cut sho', "[]", "\xff"):
        file.write_text(content)
        assert ask("lasp") == ["lasp"]
        assert ask("lasp") == []
    shutil.rmtree(folder.parent)
    folder.parent.write_text("a file")
    assert ask("lasp") == ask("lasp") == ["lasp"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A package with one strategy."""
    for name in ("impls/strategies/lasp.py", "bench/measure/engines/virtual.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("a = 1")
    return tmp_path


def test_another_state_of_the_code(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state_of_code(root)]

    def same() -> bool:
        states.append(state_of_code(root))
        return len(set(states)) < len(states)

    assert same()
    states.pop()
    (root / "impls/strategies/dsp.py").write_text("a = 1")
    assert not same()
    (root / "impls/strategies/dsp.py").rename(root / "impls/strategies/rsa.py")
    assert not same()
    (root / "bench/measure/engines/virtual.py").write_text("a = 2")
    assert not same()
    # with the times of the file before, as `cp --preserve` leaves them
    (root / "new").write_text("a = 3")
    status = (root / "bench/measure/engines/virtual.py").stat()
    os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "new").rename(root / "bench/measure/engines/virtual.py")
    assert not same()
    monkeypatch.syspath_prepend(root / "site")
    metadata = root / "site" / "state-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: state\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[spbench.meters]\nmine = state_plugin\n")
    assert not same()
    for text in ("a = 1", "a = 2"):
        (root / "site" / "state_plugin.py").write_text(text)
        assert not same()


@pytest.mark.parametrize("kind", ["strategies", "models", "forms", "exports", "logs"])
def test_what_is_listed_goes_round(kind: str) -> None:
    entries = listing.entries(kind)
    assert entries
    assert json.loads(json.dumps(entries)) == entries


def test_what_is_kept_of_options_goes_round() -> None:
    for mistakes in (
        choices.option_mistakes("model_options", "bert-tiny", {"layer": 1, "layers": 0}),
        choices.option_mistakes("training", "zero3", {"nothing": 1}),
    ):
        assert mistakes
        assert json.loads(json.dumps(mistakes)) == [list(mistake) for mistake in mistakes]


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/spbench")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/spbench")
    monkeypatch.setenv(CACHE_FOLDER, "off")
    assert cache_folder() is None
