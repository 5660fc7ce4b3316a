"""A Dask scheduler and workers as users start them, each a program on loopback that can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.bench.hosts import until
from tests.measure.processes.command_process import LIGHT_PATH


class DaskProcesses:
    """A scheduler, and workers of one thread each. A context, which ends them all.

    Args:
        folder: an empty one, of what they keep and print.
        environment: beside that of this process.

    Attributes:
        address: as for ``--executor``.
        workers: the programs that were started as workers, dead ones too.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None):
        self.folder = folder
        # no folder below, as names of sockets may not be long
        self.temporary = Path(tempfile.mkdtemp(prefix="spbench-test-dask-"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": LIGHT_PATH,
            "TMPDIR": str(self.temporary),
            **(environment or {}),
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
        self.scheduler = self._start("scheduler", *options)
        until(lambda: file.exists() and file.read_text().endswith("}"))
        self.address = json.loads(file.read_text())["address"].replace("tcp", "dask")

    def start_workers(
        self, number: int, environment: Mapping[str, str] | None = None, *, nanny: bool = False
    ) -> None:
        """Start workers, with further variables, each in a folder that has none of our files.

        Args:
            nanny: a process of Dask's own watches each, as it does by default; else they can be killed.
        """
        options = ("--nthreads", "1", "--no-dashboard", "--local-directory", "local")
        options += ("--nanny",) if nanny else ("--no-nanny",)
        for _ in range(number):
            self.workers.append(
                self._start("worker", self.address.replace("dask", "tcp"), *options, environment=environment)
            )

    def _start(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", *words],
                env={**self.environment, **(environment or {})},
                cwd=self.folder,
                start_new_session=True,
                stdout=log,
                stderr=log,
            )

    def files_left(self) -> list[str]:
        """Temporary files of ours."""
        return [path.name for path in self.temporary.glob("spbench-*")]

    def __enter__(self) -> DaskProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self.workers, self.scheduler):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.temporary)
