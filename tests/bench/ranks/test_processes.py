"""Processes that are forked from a server are as if this process had spawned them, but warm."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.ranks import processes
from spbench.bench.ranks.processes import START_METHOD, Surroundings, main_module_hidden, starting_context

pytestmark = pytest.mark.skipif(START_METHOD != "forkserver", reason="processes are spawned here")

ROOT = Path(__file__).parents[3]
VARIABLE = "SPBENCH_TEST_VARIABLE"


SCRIPT = """
if __name__ == "__main__":
    from spbench.bench.ranks.processes import starting_context

    process = starting_context().Process(target=print, args=("forked",))
    process.start()
    process.join()
"""


def surroundings() -> dict[str, Any]:
    """What a process can see of those of :class:`Surroundings`, and of where it is and looks for modules."""
    return {
        "environment": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "folder": os.getcwd(),
        "path": sys.path,
    }


def answer_surroundings(given: Surroundings, connection: Connection, of_launcher: dict[str, str]) -> None:
    os.environ.update(of_launcher)
    given.take_on()
    connection.send(surroundings())


def of_a_process(**of_launcher: str) -> dict[str, Any]:
    """The surroundings of a process that is started now, by a launcher that sets these variables."""
    context = starting_context()
    ours, theirs = context.Pipe()
    arguments = (Surroundings(), theirs, of_launcher)
    process = context.Process(target=answer_surroundings, args=arguments)  # type: ignore[attr-defined]
    with main_module_hidden():
        process.start()
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def test_a_process_has_the_surroundings_of_the_one_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the server, which has started before they changed."""
    assert of_a_process() == surroundings()
    monkeypatch.setenv(VARIABLE, "changed")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    cores, (soft, hard) = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        os.sched_setaffinity(0, {min(cores)})
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        assert of_a_process() == surroundings()
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert of_a_process()["cores"] == sorted(cores)


def test_what_a_launcher_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # as if the command itself were run by torchrun
    assert of_a_process()["environment"]["RANK"] == "0"
    assert of_a_process(RANK="3")["environment"] == {**os.environ, "RANK": "3"}


def answer_modules(connection: Connection) -> None:
    connection.send(sorted(sys.modules))


def test_the_server_has_imported_what_cells_need() -> None:
    context = starting_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=answer_modules, args=(theirs,))  # type: ignore[attr-defined]
    with main_module_hidden():
        process.start()
    modules = set(ours.recv())
    process.join()
    assert modules >= {
        *("torch._dynamo", "sympy", "spbench.bench.ranks.rank_process"),
        *("spbench.impls.strategies.lasp", "spbench.impls.models.bert", "spbench.bench.search.boundary"),
    }


def test_what_the_server_imports_starts_no_thread() -> None:
    """A lock that another thread holds at a fork would be held for ever in the new process."""
    code = "import os, spbench.bench.engines.preloaded; print(len(os.listdir('/proc/self/task')))"
    with processes._environment_of_server():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_server_imports_nothing_of_the_folder_it_is_in(tmp_path: Path) -> None:
    """A file there has a name that torch imports; `spbench` itself does not look for modules there."""
    (tmp_path / "sympy.py").write_text("raise SystemExit('imported the file of the user')\n")
    (tmp_path / "spbench.py").write_text("raise SystemExit('imported the file of the user')\n")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("forked\n", "")


def test_the_environment_of_this_process_is_as_before() -> None:
    before = dict(os.environ)
    with processes._environment_of_server():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert dict(os.environ) == before
