"""Stand-ins for the engines that import no torch, for tests in which many processes start."""

import os
import signal
import time
from pathlib import Path

from spbench.bench.cell import Cell, Measurement
from spbench.impls.layout import Unsupported

#: names of environment variables; RUN: which of these functions gated_spbench.py measures cells with
GATE, LOG, RUN = "SPBENCH_TEST_GATE", "SPBENCH_TEST_LOG", "SPBENCH_TEST_RUN"


def log(line: str) -> None:
    """Write a line to LOG."""
    with open(os.environ[LOG], "a") as file:
        file.write(line + "\n")


def answer(cell: Cell) -> Measurement:
    """A sequence length of 1000 a rank; three ranks cannot be, five are a fault."""
    if cell.sizes.world == 3:
        raise Unsupported("3 ranks do not divide", "use 2 or 4")
    if cell.sizes.world == 5:
        raise ValueError("five\nis a fault")
    sent = [{"phase": "forward", "collective": "send", "sent_bytes": 2**20}]
    return Measurement(
        answer=1000 * cell.sizes.world, peak_memory_bytes=2**30, communication=sent, formula=sent
    )


def gated(cell: Cell) -> Measurement:
    """As :func:`answer`, but fewer than four ranks end only when the file GATE exists; writes the process
    and the cell to LOG."""
    log(f"{os.getpid()} {cell.key}")
    while cell.sizes.world < 4 and not Path(os.environ[GATE]).exists():
        time.sleep(0.02)
    return answer(cell)


def brief(cell: Cell) -> Measurement:
    """As :func:`answer`, after a moment; writes the process and the cell to LOG."""
    log(f"{os.getpid()} {cell.key}")
    time.sleep(0.02)
    return answer(cell)


def killing_its_host(cell: Cell) -> Measurement:
    """As :func:`answer`; two ranks kill the program above the one whose worker process this is."""
    if cell.sizes.world == 2:
        process = os.getpid()
        for _ in ("the server it was forked from", "the runner", "the host"):
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(process, signal.SIGKILL)
        time.sleep(60.0)
    return answer(cell)
