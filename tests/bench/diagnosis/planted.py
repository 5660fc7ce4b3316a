"""Checks that go wrong."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from spbench.bench.diagnosis.check import Finding

#: of the environment: the file into which :func:`hangs` writes the number of a process that it starts
CHILD_FILE = "SPBENCH_TEST_CHILD_FILE"


def talks() -> Iterator[Finding]:
    print("this is no finding")
    yield Finding("talk", "ok", "done")


def crashes() -> Iterator[Finding]:
    os.abort()
    yield


def raises() -> Iterator[Finding]:
    yield Finding("first", "ok", "never shown")
    raise ArithmeticError("planted")


def hangs() -> Iterator[Finding]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(os.environ[CHILD_FILE], "w") as file:
        file.write(str(child.pid))
    time.sleep(3600)
    yield
