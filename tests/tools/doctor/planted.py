"""Checks that go wrong."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from spbench.bench.tools.doctor.diagnosis import Observation

#: of the environment: the file into which :func:`hangs` writes the number of a process that it starts
CHILD_FILE = "SPBENCH_TEST_CHILD_FILE"


def talks() -> Iterator[Observation]:
    print("this is no observation")
    yield Observation("talk", "ok", "done")


def crashes() -> Iterator[Observation]:
    os.abort()
    yield


def raises() -> Iterator[Observation]:
    yield Observation("first", "ok", "never shown")
    raise ArithmeticError("planted")


def hangs() -> Iterator[Observation]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(os.environ[CHILD_FILE], "w") as file:
        file.write(str(child.pid))
    time.sleep(3600)
    yield
