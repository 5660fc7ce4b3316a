"""Stand-ins for the engines, and a small scenario: importable by other processes, without torch."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measurement import Measurement
from spbench.impls.layout import Unsupported
from tests.grid import data

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SCENARIO = data(__file__)["SCENARIO"]

#: names of environment variables; RUN: which of these functions gated_spbench.py measures cells with
GATE, LOG, RUN = "SPBENCH_TEST_GATE", "SPBENCH_TEST_LOG", "SPBENCH_TEST_RUN"


def cell(world: int, engine: str = "virtual", **more: object) -> Cell:
    """A cell of that many ranks, which the functions below measure in place of an engine."""
    content = {"model": "bert-tiny", "strategy": "ring_self_attention", "batch": 2, "seq_len": 8}
    return Cell.model_validate({**content, "sizes": Sizes(sp=world), "engine": engine, **more})


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


def moody(cell: Cell) -> Measurement:
    """As :func:`answer`; the process dies of two ranks, and prints where it should not."""
    print("noise of an engine")
    if cell.sizes.world == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(cell)


def logged(cell: Cell) -> Measurement:
    """As :func:`answer`, and writes to LOG when a cell begins and ends."""
    _log(f"begin {cell.sizes.world}")
    time.sleep(0.1)  # long enough for a second cell to begin, if one could
    _log(f"end {cell.sizes.world}")
    return answer(cell)


def meeting(cell: Cell) -> Measurement:
    """As :func:`answer`, once as many cells have begun as this one has ranks; fails if they do not come."""
    _log(f"begin {cell.sizes.world}")
    deadline = time.monotonic() + 60.0
    while len(Path(os.environ[LOG]).read_text().splitlines()) < cell.sizes.world:
        if time.monotonic() > deadline:
            raise TimeoutError("it runs alone")
        time.sleep(0.02)
    return answer(cell)


def hanging(cell: Cell) -> Measurement:
    """As :func:`answer`, but two ranks never end. Writes the processes to LOG."""
    _log(str(os.getpid()))
    if cell.sizes.world == 2:
        print("last words", file=sys.stderr)
        waits_for_ever()
    return answer(cell)


def waits_for_ever() -> None:
    while True:
        time.sleep(0.01)


def faulty(cell: Cell) -> Measurement:
    """As :func:`answer`, after two real ranks have met; rank 1 does what the cell's variant names."""
    from spbench.bench.measure.engines.distributed import launch

    launch(cell, meet_unless)
    return answer(cell)


def meet_unless(mesh: DeviceMesh, cell: Cell) -> None:
    """A fault on rank 1, in the middle of the work of both."""
    import torch
    import torch.distributed as dist

    _log(str(os.getpid()))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        FAULTS_OF_A_RANK[cell.variant]()
    dist.all_reduce(torch.ones(2))


def _hangs() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as stubborn as a process can be
    waits_for_ever()


def _raises() -> None:
    raise ArithmeticError("planted\nin rank 1")


def _runs_out_of_memory() -> None:
    import torch

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, most))
    torch.empty(2**30)


FAULTS_OF_A_RANK = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": _hangs,
    "hangs too": _hangs,
    "raises": _raises,
    "out of memory": _runs_out_of_memory,
    "": lambda: None,
}


def dying_later(cell: Cell) -> Measurement:
    """As :func:`answer`; the process that measured two ranks dies a moment afterwards."""
    _log(str(os.getpid()))
    if cell.sizes.world == 2:
        threading.Timer(1.0, os._exit, [7]).start()
    return answer(cell)


def ending_with_words(cell: Cell) -> Measurement:
    """A library ends the process, and says why only on standard error."""
    print("many words\n" * 5000, file=sys.stderr)
    print("cannot open the heart of gold", file=sys.stderr)
    sys.stderr.flush()
    ctypes.CDLL(None)._exit(1)
    raise AssertionError


def gated(cell: Cell) -> Measurement:
    """As :func:`answer`, but fewer than four ranks end only when the file GATE exists; writes the process
    and the cell to LOG."""
    _log(f"{os.getpid()} {cell.key}")
    while cell.sizes.world < 4 and not Path(os.environ[GATE]).exists():
        time.sleep(0.02)
    return answer(cell)


def brief(cell: Cell) -> Measurement:
    """As :func:`answer`, after a moment; writes the process and the cell to LOG."""
    _log(f"{os.getpid()} {cell.key}")
    time.sleep(0.02)
    return answer(cell)


def killing_its_host(cell: Cell) -> Measurement:
    """As :func:`answer`; two ranks kill the program above the one whose worker process this is."""
    if cell.sizes.world == 2:
        process = os.getpid()
        for _ in ("the server it was forked from", "the host"):
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(process, signal.SIGKILL)
        time.sleep(60.0)
    return answer(cell)


def cluster_of(cell: Cell) -> Measurement:
    """The figures of the cell's cluster, and a reason with its name."""
    figures = load_cluster(cell.cluster).model_dump(mode="json")
    return Measurement(
        reason=f"cluster {cell.cluster} is this one", meters={"cluster": figures, "file": cell.cluster}
    )


def _log(line: str) -> None:
    with open(os.environ[LOG], "a") as log:
        log.write(line + "\n")
