"""Jobs of ranks and their answers, which of several failures is the cause, and what hanging processes write
on signals: the stacks of their threads and their last collectives. This module does not import torch.
"""

import faulthandler
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spbench.impls import file_digests

#: the environment variable with the folder into which a worker and its ranks write their stacks
STACKS_FOLDER = "SPBENCH_STACKS_FOLDER"

#: seconds that processes have to write their stacks
STACKS_S = 6.0

#: how many of its last collectives a hanging rank writes
_LAST_COLLECTIVES = 20


def write_stacks_on_signal(name: str) -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads, and go on.

    They go to the file ``name`` in the folder :data:`STACKS_FOLDER`, if the environment has one. The handler
    is C code, so it answers while a thread waits inside a library.
    """
    if folder := os.environ.get(STACKS_FOLDER):
        # stays open for as long as the process lives
        descriptor = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True, chain=False)


def write_collectives_on_signal(name: str) -> None:
    """From now on SIGUSR2 makes this process write the last collectives that its process groups have begun to
    the file ``name`` in the folder :data:`STACKS_FOLDER`, if the environment has one.

    A thread waits for the signal, which all threads must block: the main thread may hang in a collective.
    """
    if not (folder := os.environ.get(STACKS_FOLDER)):
        return
    file = Path(folder, name)
    file.unlink(missing_ok=True)  # an earlier process with this name may have left one

    def wait() -> None:
        while True:
            signal.sigwait([signal.SIGUSR2])
            file.write_text(_last_collectives() or "none\n", encoding="utf-8")

    threading.Thread(target=wait, daemon=True).start()


def _last_collectives() -> str:
    """A line for each of the last collectives of this process, from torch's flight recorder: number, name,
    shapes, group, state."""
    from torch._C import _distributed_c10d as c10d  # a rank has imported torch; a worker needs none

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # an older release, built without NCCL
        return ""
    entries = json.loads(dump()).get("entries", [])[-_LAST_COLLECTIVES:]
    return "".join(
        f"{entry['record_id']} {entry['profiling_name']} {entry['input_sizes']} "
        f"on {' '.join(entry['process_group'])}: {'ended' if entry['retired'] else entry['state']}\n"
        for entry in entries
    )


def stacks_of(folder: Path, pids: Iterable[int | None]) -> str:
    """Make processes write their stacks and last collectives into a folder; returns the text of each file
    under its name, then, if py-spy is installed, its view, which has Python lines below C code.

    Takes up to twice :data:`STACKS_S` seconds.
    """
    living = [pid for pid in pids if pid is not None]
    text = ""
    # one after the other: the stacks of a thread that runs are written while they change
    for times, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), start=1):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        text = written_stacks(folder, times * len(living))
    return text + "".join(_seen_by_py_spy(pid) for pid in living)


def written_stacks(folder: Path, files: int | None = None) -> str:
    """The stacks that signalled processes write into files of a folder, each under its file's name.

    Args:
        files: how many files will have text; None: all in the folder. The call waits until they do and
            nothing more is written, for up to :data:`STACKS_S` seconds.
    """
    deadline, before, sizes = time.monotonic() + STACKS_S, [-1], [0]
    while time.monotonic() < deadline:
        written = sum(size > 0 for size in sizes)
        if sizes == before and written >= (len(sizes) if files is None else files):
            break
        time.sleep(STACKS_S / 20)
        before, sizes = sizes, [file.stat().st_size for file in _files(folder)]
    texts = {file.name: file.read_text(errors="replace", encoding="utf-8") for file in _files(folder)}
    return "".join(f"-- {name} --\n{text.rstrip()}\n" for name, text in texts.items() if text)


def _files(folder: Path) -> list[Path]:
    return sorted(filter(Path.is_file, folder.rglob("*")))


def _seen_by_py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=STACKS_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # mostly because py-spy may not read the process
        return ""
    return f"-- process {pid} as py-spy sees it --\n{seen.rstrip()}\n"


#: the environment variable with the number of agents and the rendezvous of their store, pickled
AGENTS = "SPBENCH_AGENTS"

#: after one rank failed, seconds that the others have to notice it before they are killed
GRACE_S = 5.0

#: the beginning of the reason if ranks have not answered in time
NO_END = "no end within its limit of"

#: the status of a cell whose ranks failed; a subset of :data:`spbench.bench.measurement.Status`
Fate = Literal["failed", "oom", "timeout", "unsupported"]


class RankError(RuntimeError):
    """A rank raised, ran out of memory, died or did not answer; the text holds the rank and its traceback.

    Attributes:
        status: the status of the cell that the ranks ran.
        reason: one line: the rank and what it raised, or who did not answer in time.
        silent: the ranks that had not answered when the error was raised.
        log: the stacks and last collectives of ranks that hung; "" where these are unknown.
    """

    def __init__(
        self, rank: int, what: str, status: Fate = "failed", silent: Collection[int] = (), raised: str = ""
    ):
        who = "" if status == "timeout" else f"rank {rank}: "
        super().__init__(who + what)
        self.rank, self.status, self.silent = rank, status, silent
        self.reason = who + " ".join((raised or what).split())
        self.log = ""


@dataclass(frozen=True)
class RankJob:
    """Work for the ranks of one process group.

    Attributes:
        number: unique among the jobs with the same store.
        sizes: the number of ranks along every axis of the mesh, in order.
        device: the type of the devices of the tensors: "cpu" or "cuda".
        backend: a backend of torch.distributed.
        timeout_s: after so many seconds the job has failed.
        idle_s: after so many seconds in which its ranks only wait, the job has failed; None: not for that.
        work: a function of a module and its arguments, pickled; it is called with the mesh before these.
        fresh: whether processes are started for this job alone.
        files: the digests of users' files that the work may need (:func:`file_digests`).
    """

    number: int
    sizes: dict[str, int]
    device: str
    backend: str
    timeout_s: float
    work: bytes
    fresh: bool = False
    idle_s: float | None = None
    files: Mapping[str, str] = field(default_factory=file_digests)

    @property
    def ranks(self) -> int:
        """How many ranks the job has."""
        return math.prod(self.sizes.values())


@dataclass(frozen=True)
class RankAnswer:
    """A rank's answer to a job: its result, or how it failed.

    Attributes:
        value: what the function returned; None unless status is ok.
        place: the rank's place among the failures, from 1; 0 for a rank that died, which cannot count itself.
        text: a traceback, or what happened.
        raised: type and message of the rank's exception; "" without one.
        log: the rank's stacks and last collectives, if it was ended and these were asked for.
    """

    rank: int
    value: Any = None
    status: Literal["ok"] | Fate = "ok"
    place: int = 0
    text: str = ""
    raised: str = ""
    log: str = ""


def collect(
    ranks: int, timeout_s: float, next_answer: Callable[[Collection[int], float], RankAnswer | None]
) -> list[Any]:
    """The results of all ranks, in order.

    Args:
        next_answer: called with the ranks that have not answered and seconds; returns the answer of one of
            them, or None if there is none in that time, or if all of them only wait.

    Raises:
        RankError: a rank failed, or did not answer in time. If several failed, the first is the cause: the
            others failed as they waited for that rank.
    """
    values: list[Any] = [None] * ranks
    failures: list[RankAnswer] = []
    waiting = set(range(ranks))
    deadline = time.monotonic() + timeout_s
    while waiting:
        answer = next_answer(waiting, max(0.0, deadline - time.monotonic()))
        if answer is None:
            break
        waiting.discard(answer.rank)
        if answer.status == "ok":
            values[answer.rank] = answer.value
            continue
        failures.append(answer)
        deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        first = min(failures, key=lambda answer: (answer.place, answer.rank))
        assert first.status != "ok"
        error = RankError(first.rank, first.text, first.status, waiting, first.raised)
        error.log = "".join(answer.log for answer in sorted(failures, key=lambda answer: answer.rank))
        raise error
    if waiting:
        ranks_named = f"rank{'s' if len(waiting) > 1 else ''} {', '.join(map(str, sorted(waiting)))}"
        limit = f"{NO_END} {timeout_s:g} s" if time.monotonic() >= deadline else "nothing but waiting"
        what = f"{limit}, no answer from {ranks_named}"
        raise RankError(min(waiting), what, "timeout", sorted(waiting))
    return values
