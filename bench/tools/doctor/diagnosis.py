"""What a check of an installation is, and running it in a process of its own with a time limit.

What a check needs it imports itself: a library that is missing, crashes or hangs as it is imported is what it
observes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from spbench.bench.measure.processes.starting import environment_of_child

#: what the child runs: the function's module and name are its arguments
_CHILD = "from spbench.bench.tools.doctor.diagnosis import print_observations; print_observations()"
#: characters of what a check said last that are shown
_SAID = 200
#: for which the end of a killed check is waited for
_REAPING_S = 5.0


@dataclass(frozen=True)
class Observation:
    """One line of the diagnosis.

    Attributes:
        subject: what was looked at.
        status: "ok"; "warning", where something works less well or only for some; "missing", where it does
            not work.
        found: what is there.
        remedy: one line: what to do about it.
        is_needed: whether virtual ranks, or real ones on CPUs, do not work without it.
    """

    subject: str
    status: Literal["ok", "warning", "missing"]
    found: str
    remedy: str = ""
    is_needed: bool = False

    @classmethod
    def judged(
        cls,
        subject: str,
        works: bool,
        found: str,
        remedy: str,
        otherwise: Literal["warning", "missing"] = "warning",
        is_needed: bool = False,
    ) -> Observation:
        """Something that works, or else has a remedy."""
        return cls(subject, "ok", found) if works else cls(subject, otherwise, found, remedy, is_needed)


@dataclass(frozen=True)
class Check:
    """Something that is looked at.

    Attributes:
        look: a function of a module; takes no arguments.
        is_needed: of the observation if ``look`` crashes, raises or does not end.
        limit_s: after which it is ended.
    """

    look: Callable[[], Iterable[Observation]]
    is_needed: bool = False
    limit_s: float = 60.0


def diagnose(chosen: Mapping[str, Check]) -> list[Observation]:
    """What the checks find, in their order; each runs in a process of its own, all at once.

    For one whose process dies, raises or does not end in time, an observation that says so. No process is
    left when this returns or is interrupted.
    """
    running: list[_Running] = []
    with ThreadPoolExecutor(max(1, len(chosen))) as threads:
        try:
            running += (_Running(name, check) for name, check in chosen.items())
            return [line for lines in threads.map(_Running.observations, running) for line in lines]
        finally:
            for each in running:
                each.end()


class _Running:
    """A check, and the process that runs it."""

    def __init__(self, name: str, check: Check):
        self.name, self.check = name, check
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, check.look.__module__, check.look.__qualname__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | environment_of_child(),
            start_new_session=True,  # so that processes of the check end with it
        )

    def observations(self) -> list[Observation]:
        """Wait for the process, at most for the check's limit."""
        try:
            printed, said = self.process.communicate(timeout=self.check.limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            with suppress(subprocess.TimeoutExpired):  # a process of its own session may hold the pipe
                self.process.communicate(timeout=_REAPING_S)
            return [self._failure(f"no answer within {self.check.limit_s:g} s")]
        if code := self.process.returncode:
            ending = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            last = next(reversed(said.strip().splitlines()), "")[-_SAID:]
            return [self._failure(f"{ending}{last and f': {last}'}")]
        return [Observation(**each) for each in json.loads(printed)]

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _failure(self, what: str) -> Observation:
        look = self.check.look
        again = f"see: python -c 'from {look.__module__} import *; print([*{look.__qualname__}()])'"
        return Observation(self.name, "missing", what, again, self.check.is_needed)


def print_observations() -> None:
    """For the child: print, as JSON, what the function finds that its arguments name."""
    module, function = sys.argv[1:]
    with redirect_stdout(sys.stderr):
        observations = [asdict(each) for each in getattr(importlib.import_module(module), function)()]
    print(json.dumps(observations))
