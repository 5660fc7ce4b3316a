"""Which of the processes that a test has started are left, and waiting for such things."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")


def left_of(log: Path) -> list[int]:
    """Those of the processes in a file, one number a line, that are not gone; a zombie is."""
    found = []
    for pid in {int(line) for line in log.read_text().split()}:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


#: seconds after which a test gives up on another process
PATIENCE_S = 180.0


def until(what: Callable[[], bool], otherwise: str = "waited in vain") -> None:
    """Wait until something is so; an error if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
