"""The command `spbench run` in a process of its own, on cells that a function of fakes.py measures, to be
interrupted and killed. As a program this module is that command."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import spbench.api  # noqa: F401 -- takes its own name of the sweep, which must not be the patched one
import spbench.bench.measure.sweep.sweep as sweeping
from spbench.bench.command_line.cli import cli, main
from spbench.bench.measure.sweep.results import RESULTS_FILE, read_rows
from tests.bench import fakes
from tests.bench.fakes import GATE, LOG, RUN, SCENARIO
from tests.bench.hosts import until

ROOT = Path(__file__).parents[3]
#: for PYTHONPATH: ours, and workers that start without torch
LIGHT_PATH = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "light")])


class Command:
    """The command `spbench run` in a process group of its own, on cells that a gate holds up.

    Args:
        folder: of all its files; the results are in its folder "out".
        options: further ones of the command line.
        scenario: the content of the scenario file.
        run: a function of fakes.py that measures the cells.
    """

    def __init__(self, folder: Path, *options: str, scenario: str = SCENARIO, run: str = "gated"):
        self.folder, self.results = folder, folder / "out" / RESULTS_FILE
        self.gate, self.log, file = folder / "gate", folder / "log", folder / "small.yaml"
        file.write_text(scenario)
        self.environment = {
            **os.environ,
            "PYTHONPATH": LIGHT_PATH,
            RUN: run,
            GATE: str(self.gate),
            LOG: str(self.log),
        }
        self.arguments = ["run", "--scenario", str(file), "--output", str(folder / "out"), "--jobs", "2"]
        self.arguments += options
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *self.arguments],
            env=self.environment,
            cwd=self.folder,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # a shell's background job ignores it, and so would all that the tests start there
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return self.process

    def again(self, monkeypatch: pytest.MonkeyPatch) -> Result:
        """The same command in this process, which need not import torch anew."""
        for name in (RUN, GATE, LOG):
            monkeypatch.setenv(name, self.environment[name])
        monkeypatch.chdir(self.folder)
        monkeypatch.setattr(sweeping, "sweep_cells", of_fakes(self.environment))
        return CliRunner().invoke(cli, self.arguments)

    def begun(self) -> list[tuple[int, str]]:
        """(process, key) of each cell that has begun."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(int(pid), key) for pid, key in (line.split() for line in lines)]

    def until_two_are_held_up(self) -> None:
        """The two cells of 4 and 8 ranks have ended, two more have begun."""
        until(lambda: len(self.begun()) == 4 and len(read_rows(self.results)[0]) == 2)

    def until_processes_are_gone(self) -> None:
        """The command and all that it has started, on whatever machine, have ended."""
        until(lambda: not self.processes())

    def processes(self) -> list[int]:
        """The processes that have this command's environment, and those that run its cells elsewhere, forked
        from a server that has another; zombies are none."""
        mark, cells = f"{LOG}={self.log}".encode(), {pid for pid, _ in self.begun()}
        return [
            pid
            for pid, variables in environments()
            if mark in variables.split(b"\0") or (pid in cells and is_forked(pid))
        ]

    def end(self) -> None:
        """End it, whatever it does."""
        self.gate.touch()
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def is_forked(pid: int) -> bool:
    """Whether a process is forked from the server of these tests, and not another one with an old number."""
    try:
        return b"light_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone
        return False


def environments() -> Iterator[tuple[int, bytes]]:
    """Each process that runs, with the environment that it has started with."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                yield int(folder.name), (folder / "environ").read_bytes()
        except OSError:  # it is gone, or somebody else's
            continue


def of_fakes(environment: Mapping[str, str]) -> Callable[..., Any]:
    """The sweep, with the measuring function that the environment names."""
    return functools.partial(sweeping.sweep, run=getattr(fakes, environment[RUN]))


if __name__ == "__main__":
    sweeping.sweep_cells = of_fakes(os.environ)  # type: ignore[assignment]
    main()
