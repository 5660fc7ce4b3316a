"""A sweep that is killed again and again, at random: no row is lost, doubled or cut, no process is left."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from spbench.bench.row import FINAL
from tests.bench.hosts import PATIENCE_S, needs_proc, until
from tests.grid import data
from tests.measure.processes.command_process import Command

pytestmark = needs_proc

SCENARIO = data(__file__)["SCENARIO"]
CELLS = 48

#: a worker is killed, or the command gets a signal; and the exit codes that this may lead to
KILLS = {"worker": (0, 1), "SIGKILL": (-9,), "SIGTERM": (-15,), "SIGINT": (130, -2)}


class Siege:
    """Sweeps, one after another, that are killed.

    Attributes:
        counts: how many kills there were of each kind, and how many sweeps were brought to their end.
        expected: what the first sweep, which is left alone, finds for each cell.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.expected: dict[str, object] = {}
        self._begin_sweep()
        self._finish()
        self.expected = self._final()
        assert len(self.expected) == CELLS

    def _begin_sweep(self) -> None:
        self.before, self.cut = b"", set[int]()
        folder = self.folder / str(self.counts["sweeps"])
        folder.mkdir()
        self.command = Command(folder, scenario=SCENARIO, run="brief")

    @property
    def kills(self) -> int:
        return self.counts.total() - self.counts["sweeps"]

    def run(self, kills: int) -> None:
        """Kill so many times, and check the file after each."""
        self._begin_sweep()
        while self.kills < kills:
            process = self.command.start()
            kind = "worker"
            while kind == "worker" and process.poll() is None:
                self._wait()
                kind = self.random.choice([*KILLS])
                self._kill(kind)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode in (*KILLS[kind], 0, 1)  # it may have ended before
            self.command.until_processes_are_gone()
            self._check(may_be_cut=kind == "SIGKILL")
            if len(self._final()) == CELLS:
                self.counts["sweeps"] += 1
                self._begin_sweep()
        self._finish()

    def _wait(self) -> None:
        """Until some more rows are there, or for a moment of the start, when there are none yet."""
        process, rows = self.command.process, self._lines() + self.random.randint(0, 12)
        if self.random.random() < 0.2:
            time.sleep(self.random.uniform(0.0, 1.0))
        else:
            until(lambda: self._lines() >= rows or process.poll() is not None)
            time.sleep(self.random.uniform(0.0, 0.02))

    def _kill(self, kind: str) -> None:
        process = self.command.process
        if process.poll() is not None:
            return
        if kind != "worker":
            os.kill(process.pid, signal.Signals[kind])
        else:
            workers = {pid for pid, _ in self.command.begun()} & {*self.command.processes()}
            if not workers:
                return
            os.kill(self.random.choice(sorted(workers)), signal.SIGKILL)
        self.counts[kind] += 1

    def _lines(self) -> int:
        with suppress(FileNotFoundError):
            return self.command.results.read_bytes().count(b"\n")
        return 0

    def _content(self) -> bytes:
        with suppress(FileNotFoundError):
            return self.command.results.read_bytes()
        return b""

    def _check(self, may_be_cut: bool = False) -> None:
        """What was there is there, and each line is a row; but the last one, if the command was killed inside
        of its write."""
        content = self._content()
        assert content.startswith(self.before)
        if content and not content.endswith(b"\n"):
            assert may_be_cut
            self.cut.add(content.count(b"\n"))
        self.before = content
        final = self._final()
        assert final.items() <= (self.expected or final).items()

    def _final(self) -> dict[str, object]:
        """Status and measurement of the cells that are done, by key; of none there are two rows."""
        lines = self._content().split(b"\n")[:-1]
        rows = [json.loads(line) for number, line in enumerate(lines) if number not in self.cut]
        final = [(row["key"], [row["status"], row["measurement"]]) for row in rows if row["status"] in FINAL]
        assert len(dict(final)) == len(final)
        return dict(final)

    def _finish(self) -> None:
        """Undisturbed, the sweep comes to its end."""
        process = self.command.start()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        self.command.until_processes_are_gone()
        self._check()
        assert len(self._final()) == CELLS
        self.counts["sweeps"] += 1


@pytest.mark.slow
def test_nothing_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    siege = Siege(tmp_path, seed=200)
    try:
        siege.run(200)
    finally:
        siege.command.end()
    assert siege.kills == 200
    assert all(siege.counts[kind] for kind in KILLS), siege.counts
    with capsys.disabled():
        print(f"\n{siege.kills} kills: {dict(siege.counts)}", end=" ")
