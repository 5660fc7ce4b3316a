"""Processes that are forked from a server are as if this process had spawned them, but warm."""

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.engine import engine_classes
from spbench.bench.measure.processes import starting
from spbench.bench.measure.processes.child import GRACE_S, Child
from spbench.bench.measure.processes.starting import (
    START_METHOD,
    Surroundings,
    beginning_server,
    starting_context,
)
from tests.grid import data

pytestmark = pytest.mark.skipif(START_METHOD != "forkserver", reason="processes are spawned here")

ROOT = Path(__file__).parents[3]
VARIABLE = "SPBENCH_TEST_VARIABLE"


SCRIPT = data(__file__)["SCRIPT"]

#: the same of a server that is forked from this process, which holds a file and prints through something
FORKED = data(__file__)["FORKED"]


def surroundings() -> dict[str, Any]:
    """What a process can see of those of :class:`Surroundings`, and of where it is and looks for modules."""
    return {
        "environment": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "folder": os.getcwd(),
        "path": sys.path,
    }


def answer(connection: Connection, what: Callable[[], Any]) -> None:
    connection.send_bytes(pickle.dumps(what()))


def of_a_process(what: Callable[[], Any] = surroundings) -> Any:
    """What a function returns in a process that is started now."""
    child = Child(answer, what)
    returned = child.receive()
    child.end(GRACE_S)
    return returned


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


def launched() -> Any:
    """The environment of a process that a launcher has started with another rank."""
    os.environ["RANK"] = "3"
    Surroundings({**os.environ, "RANK": "0"}).take_on()
    return dict(os.environ)


def test_what_a_launcher_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # as if the command itself were run by torchrun
    assert of_a_process()["environment"]["RANK"] == "0"
    assert of_a_process(launched) == {**os.environ, "RANK": "3"}


def ignores_signals() -> bool:
    """Whether the signals for stacks do nothing in this process, as in the server."""
    return signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_the_server_alone_is_made_one() -> None:
    assert of_a_process(ignores_signals)
    engine_classes()  # has all modules of a room imported, as a command does that names things
    assert not ignores_signals()


def test_no_process_looks_for_garbage_in_what_the_server_has_imported() -> None:
    assert of_a_process(gc.get_freeze_count) > 100_000


def parents() -> tuple[int, int]:
    """The parent of this process, and that of one that it starts."""
    return os.getppid(), of_a_process(os.getppid)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="multiprocessing keeps a key for each server")
def test_a_process_starts_its_own_from_the_same_server() -> None:
    first, second = of_a_process(parents)
    assert first == second


def modules() -> set[str]:
    return set(sys.modules)


def test_the_server_has_imported_what_cells_need() -> None:
    assert of_a_process(modules) >= {
        *("torch._dynamo", "sympy", "spbench.bench.measure.processes.rank_pool"),
        *(
            "spbench.impls.strategies.lasp",
            "spbench.impls.models.bert",
            "spbench.bench.measure.engines.search",
        ),
    }


def test_the_server_imports_nothing_of_the_folder_it_is_in_and_starts_no_thread(tmp_path: Path) -> None:
    """Files there have names that torch and spbench import. A lock that another thread of the server holds at
    a fork would be held for ever in the new process. The temporary folder's path is too long for sockets."""
    (tmp_path / "sympy.py").write_text("raise SystemExit('imported the file of the user')\n")
    (tmp_path / "spbench.py").write_text("raise SystemExit('imported the file of the user')\n")
    temporary = tmp_path / ("long" * 50)
    temporary.mkdir()
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("threads of the server: 1\n", "")


def test_a_command_forks_the_server_from_itself_with_what_it_has_imported(tmp_path: Path) -> None:
    """So torch is imported once. The server has one thread, and no file that the command holds."""
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("its parent 1 False\n0 False\n", "")


@pytest.mark.parametrize(
    ("threads", "start"), [(["1"], starting._forked), (["1", "2"], util.spawnv_passfds)], ids=["one", "two"]
)
def test_a_command_with_threads_has_another_process_start_the_server(
    monkeypatch: pytest.MonkeyPatch, threads: list[str], start: Callable[..., int]
) -> None:
    starts: list[Callable[..., int]] = []
    monkeypatch.setattr(starting, "_run_server", starts.append)
    monkeypatch.setattr(starting, "_server_is_shared", False)
    monkeypatch.setattr(os, "listdir", {"/proc/self/task": threads}.__getitem__)
    with beginning_server():
        assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert starts == [start]


def test_a_server_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError("out of memory")

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", refused)
    with pytest.raises(
        UserError, match=r"^cannot start processes \(OSError: out of memory\); look at the limits"
    ):
        starting_context()
    assert "PYTHONSAFEPATH" not in os.environ
