"""A process that acts as a rank of one process group after another, and its parent's end of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.errors import UserError
from spbench.bench.measure.processes.rank_job import GRACE_S, Answer, Job, fate
from spbench.bench.measure.processes.staged_group import STAGED, register
from spbench.bench.measure.processes.start_failures import FILES_OF_GROUP, check_open_files
from spbench.bench.measure.processes.starting import (
    STACKS_FOLDER,
    Surroundings,
    main_module_hidden,
    starting_context,
    when_parent_is_gone,
    write_stacks_on_signal,
)
from spbench.impls import loose_files
from spbench.impls.axes import device_mesh
from spbench.impls.outside_code import exits_refused, printed, told

#: a collective that waits for a rank fails so many seconds after its job, whose end says which rank it was
_LATER_S = 60.0
#: how torch's CPU allocator begins what it says when the system gives it no memory
_NO_CPU_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
#: the operations of a rank that are written down when it hangs, the last ones
_LAST_OPERATIONS = 20


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet: a TCPStore that another process holds, and the prefix of their keys in it."""

    host: str
    port: int
    prefix: str = "spbench"

    def store(self) -> dist.Store:
        """A connection to it, with a timeout of 300 seconds.

        Raises:
            torch.distributed.DistError: nobody listens there.
        """
        return dist.PrefixStore(self.prefix, dist.TCPStore(self.host, self.port, is_master=False))


class RankProcess:
    """The parent's end of a process that acts as a rank; ``busy`` while it owes an answer.

    Args:
        local_rank: its number on this machine, which is also that of its GPU.
        environment: of the process.
    """

    def __init__(self, rendezvous: Rendezvous, local_rank: int, environment: Mapping[str, str]):
        context = starting_context()
        self.connection, theirs = context.Pipe()
        surroundings = Surroundings({**environment})
        arguments = (surroundings, theirs, rendezvous, local_rank)
        # daemon: multiprocessing ends it when this process exits
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        with main_module_hidden():
            self.process.start()
        theirs.close()  # so that the death of the process reads as the end of the pipe
        self.busy = False
        self.rank = local_rank

    def send(self, job: Job, rank: int) -> None:
        """Give it a job, as that rank of it."""
        self.busy, self.rank = True, rank
        with contextlib.suppress(BrokenPipeError):  # receive finds out that it is dead
            self.connection.send_bytes(pickle.dumps((job, rank)))

    def receive(self) -> Answer:
        """Wait for its answer; of a dead process it is that it failed."""
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE_S)
            return Answer(self.rank, status="failed", text=f"the process {fate(self.process.exitcode)}")
        self.busy = False
        return answer

    def kill(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(
    surroundings: Surroundings, connection: Connection, rendezvous: Rendezvous, local_rank: int
) -> None:
    """Do jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # before there are other threads, which inherit it: only the thread that waits for the signal may get it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    when_parent_is_gone()
    surroundings.take_on()
    os.environ["LOCAL_RANK"] = str(local_rank)  # device meshes of GPUs look there
    rank_name = os.environ.get("RANK", local_rank)
    write_stacks_on_signal(f"stacks of rank {rank_name}")
    _write_operations_on_signal(f"last collectives of rank {rank_name}")
    torch.set_num_threads(1)
    store = rendezvous.store()
    gc.freeze()  # a collection after a job then takes milliseconds
    while True:
        try:
            job, rank = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps(Answer(rank, _run(store, job, rank, local_rank)))
        except BaseException as error:
            # counted before the group is destroyed, and so before other ranks fail for that reason
            place = store.add(f"failures{job.number}", 1)
            answer = pickle.dumps(_answer_of(error, rank, place))
        connection.send_bytes(answer)  # first, as NCCL may not end a group in which a collective hangs
        if dist.is_initialized():
            # also closes the connections, so that ranks that wait for this one fail too
            dist.destroy_process_group()
        # cycles of groups and device meshes, or of tracebacks and their frames, would keep a group alive, and
        # with it a thread of Gloo that wakes up every 10 ms
        gc.collect()


def _answer_of(error: BaseException, rank: int, place: int) -> Answer:
    return Answer(
        rank,
        status="oom" if is_out_of_memory(error) else "failed",
        place=place,
        text=printed(error),
        raised=str(error) if isinstance(error, UserError) else told(error),
    )


def _run(store: dist.Store, job: Job, rank: int, local_rank: int) -> Any:
    loose_files.share(job.files)
    check_open_files(FILES_OF_GROUP + job.ranks, f"to be one of {job.ranks} ranks")
    if job.backend == STAGED:
        register()
        local_rank %= max(1, torch.cuda.device_count())
    if job.device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        job.backend,
        store=dist.PrefixStore(f"job{job.number}", store),
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.timeout_s + _LATER_S),
        device_id=torch.device("cuda", local_rank) if job.backend == "nccl" else None,
    )
    mesh = device_mesh(job.sizes, job.device)
    with exits_refused():
        function, args = pickle.loads(job.work)  # may import files of users
        return function(mesh, *args)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in main memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_CPU_MEMORY)


def _write_operations_on_signal(name: str) -> None:
    """From now on SIGUSR2 makes this process write the last collectives that its process groups have begun,
    from torch's flight recorder, to the file ``name`` in the folder of stacks, if there is one.

    A thread waits for the signal, which all threads must block: the main thread may hang in a collective.
    """
    if not (folder := os.environ.get(STACKS_FOLDER)):
        return
    file = Path(folder, name)
    file.unlink(missing_ok=True)  # an earlier process with this name may have left one

    def wait() -> None:
        while True:
            signal.sigwait([signal.SIGUSR2])
            file.write_text(last_operations() or "none\n", encoding="utf-8")

    threading.Thread(target=wait, daemon=True).start()


def last_operations() -> str:
    """A line for each of the last collectives of this process: number, name, shapes, group, state."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # an older release, built without NCCL
        return ""
    entries = json.loads(dump()).get("entries", [])[-_LAST_OPERATIONS:]
    return "".join(
        f"{entry['record_id']} {entry['profiling_name']} {entry['input_sizes']} "
        f"on {' '.join(entry['process_group'])}: {'ended' if entry['retired'] else entry['state']}\n"
        for entry in entries
    )
