"""Ranks as processes that run one job after another, each job in a process group of its own: how a process
acts as a rank, and a pool of such processes on this machine.

The processes are started once. A job takes as many of them as it needs.
"""

import gc
import itertools
import os
import pickle
import shutil
import socket
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from spbench.bench.errors import UserError
from spbench.bench.measure.processes.child import Child, ChildGone, requests, when_parent_is_gone
from spbench.bench.measure.processes.stacks import (
    STACKS_FOLDER,
    RankAnswer,
    RankError,
    RankJob,
    collect,
    stacks_of,
    write_collectives_on_signal,
    write_stacks_on_signal,
)
from spbench.bench.measure.processes.staged_group import STAGED, register
from spbench.bench.measure.processes.starting import FILES_OF_GROUP, FILES_OF_RANK, MEET, check_open_files
from spbench.impls import Unsupported, device_mesh, exits_refused, printed, share_files, told, whole_mesh

#: backends of torch.distributed, by the type of the tensors' devices
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_LOOPBACK = "127.0.0.1"
#: seconds that a connection on the loopback interface may take
_REACHED_S = 10.0
#: seconds after its job's limit at which a collective fails: the job's own failure names the silent rank
_LATER_S = 60.0
#: seconds between two looks at whether ranks work
_LOOK_S = 0.5
#: the beginnings of torch's messages when its CPU allocator gets no memory from the system
_NO_CPU_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class Ranks(AbstractContextManager["Ranks"]):
    """Runs one job after another, each in a process group of its own. Use it as a context manager.

    Attributes:
        size: the largest number of ranks that a job can have.
        timeout_s: seconds that a job may take by default.
    """

    size: int
    timeout_s: float = 120.0

    def run(
        self,
        sizes: Mapping[str, int],
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        idle_s: float | None = None,
        device: str = "cpu",
        backend: str = "",
    ) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank of a mesh; returns the results in the order of ranks.

        Args:
            sizes: the number of ranks along each axis of the mesh; 1 along an axis without an entry.
            function: a function of a module that the ranks can import; its arguments and result are pickled.
            timeout_s: seconds after which the job fails and its processes are killed, and then replaced.
            idle_s: seconds after which the job fails if the ranks of a :class:`RankPool` only wait.
            device: the type of the devices of the ranks' tensors.
            backend: a backend of torch.distributed; "": Gloo on CPUs, NCCL with a GPU for each rank.

        Raises:
            RankError: a rank raised, ran out of memory, died, or did not answer in time.
            ValueError: the mesh has no such axis, or more than ``size`` ranks.
        """
        # pickled before any rank starts, so that the caller gets the error if this cannot be pickled
        work = pickle.dumps((function, args))
        limit = self.timeout_s if timeout_s is None else timeout_s
        job = RankJob(0, whole_mesh(sizes), device, backend or BACKENDS[device], limit, work, idle_s=idle_s)
        if job.ranks > self.size:
            raise ValueError(f"a job on {job.ranks} ranks does not fit in a pool of {self.size}")
        return self._run(job)

    @abstractmethod
    def _run(self, job: RankJob) -> list[Any]:
        """Run a job, which has no number yet; returns the ranks' results in order."""

    @abstractmethod
    def close(self) -> None:
        """Release processes and connections; another job starts new ones if needed."""

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Rendezvous:
    """The meeting place of ranks: a TCPStore of another process, and the prefix of keys in that store."""

    host: str
    port: int
    prefix: str = "spbench"

    def store(self) -> dist.Store:
        """A connection to the store, with a timeout of 300 seconds.

        Raises:
            torch.distributed.DistError: nobody listens at that place.
        """
        return dist.PrefixStore(self.prefix, dist.TCPStore(self.host, self.port, is_master=False))


class RankProcess(Child):
    """A process that acts as a rank of one job after another; ``busy`` while it owes an answer.

    Args:
        local_rank: the process's number on this machine, and the number of its GPU.
        environment: the variables of the process.
    """

    def __init__(self, rendezvous: Rendezvous, local_rank: int, environment: Mapping[str, str]):
        super().__init__(_serve_jobs, rendezvous, local_rank, environment=environment)
        self.busy, self.rank = False, local_rank

    def give(self, job: RankJob, rank: int) -> None:
        """Start a job, in which this process is that rank."""
        self.busy, self.rank = True, rank
        self.send((job, rank))

    def answer(self) -> RankAnswer:
        """Wait for the process's answer. A dead process's answer says so, and it stays ``busy``."""
        try:
            answer: RankAnswer = self.receive()
        except ChildGone as gone:
            return RankAnswer(self.rank, status="failed", text=f"the process {gone}")
        self.busy = False
        return answer


def _serve_jobs(connection: Connection, rendezvous: Rendezvous, local_rank: int) -> None:
    when_parent_is_gone()
    os.environ["LOCAL_RANK"] = str(local_rank)  # device meshes of GPUs look there
    rank_name = os.environ.get("RANK", local_rank)
    write_stacks_on_signal(f"stacks of rank {rank_name}")
    write_collectives_on_signal(f"last collectives of rank {rank_name}")
    torch.set_num_threads(1)
    store = rendezvous.store()
    gc.freeze()  # a collection after a job then takes milliseconds
    ending = _let_go_of_groups()  # there are none yet
    for job, rank in requests(connection):
        try:
            _check_open_files(job, ending)
            answer = pickle.dumps(RankAnswer(rank, _run(store, job, rank, local_rank)))
        except BaseException as error:
            # counted before the group is destroyed, which makes other ranks fail
            place = store.add(f"failures{job.number}", 1)
            answer = pickle.dumps(_answer_of(error, rank, place))
        connection.send_bytes(answer)  # first, as NCCL may not end a group in which a collective hangs
        ending = _let_go_of_groups()
        # cycles of groups and device meshes, or of tracebacks and their frames, would keep a group alive, and
        # with it a thread of Gloo that wakes up every 10 ms
        gc.collect()


def _let_go_of_groups() -> threading.Thread:
    """Destroy the groups of a job and close their connections, so that ranks that wait for this one fail too.
    Returns a thread that waits until Gloo's groups have ended, up to 10 ms for each."""
    groups = list(dist.distributed_c10d._world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    ending = threading.Thread(target=groups.clear)
    ending.start()
    return ending


def _check_open_files(job: RankJob, ending: threading.Thread) -> None:
    """Refuse a job that needs more open files than this process may have, after those of the last job are
    closed."""
    needed = FILES_OF_GROUP + job.ranks, f"to be one of {job.ranks} ranks"
    with suppress(UserError):
        check_open_files(*needed)
        return
    ending.join()
    check_open_files(*needed)


def _answer_of(error: BaseException, rank: int, place: int) -> RankAnswer:
    refused: Literal["unsupported", "failed"] = "unsupported" if isinstance(error, Unsupported) else "failed"
    return RankAnswer(
        rank,
        status="oom" if is_out_of_memory(error) else refused,
        place=place,
        text=printed(error),
        raised=str(error) if isinstance(error, UserError) else told(error),
    )


def _run(store: dist.Store, job: RankJob, rank: int, local_rank: int) -> Any:
    share_files(job.files)
    if job.backend == STAGED:
        register()
        local_rank %= max(1, torch.cuda.device_count())
    if job.device == "cuda":
        torch.cuda.set_device(local_rank)
    store = dist.PrefixStore(f"job{job.number}", store)
    os.environ[MEET] = "0"  # a mesh has groups by the dozen, most of which connect nobody
    dist.init_process_group(
        job.backend,
        store=store,
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.timeout_s + _LATER_S),
        device_id=torch.device("cuda", local_rank) if job.backend == "nccl" else None,
    )
    mesh = device_mesh(job.sizes, job.device)
    # wait until all ranks are connected, because others could not connect to a rank that ended
    if store.add("connected", 1) == job.ranks:
        store.set("all connected", "")
    store.wait(["all connected"], timedelta(seconds=job.timeout_s + _LATER_S))
    os.environ[MEET] = "1"
    with exits_refused():
        function, args = pickle.loads(job.work)  # may import files of users
        return function(mesh, *args)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is a failed allocation, on a GPU or in main memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_CPU_MEMORY)


class RankPool(Ranks):
    """Processes of this machine that act as the ranks of one process group after another.

    They meet on the loopback interface, so that nobody on the network can reach them. They end with this
    process, however it ends.

    Args:
        size: the largest number of ranks that a job can have.
        timeout_s: seconds that a job may take by default.

    Raises:
        UserError: this process may open too few files, or the loopback interface is down.
    """

    def __init__(self, size: int, timeout_s: float = Ranks.timeout_s):
        if size < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {size}")
        check_open_files(FILES_OF_GROUP + FILES_OF_RANK * size, f"to start {size} ranks")
        self.size, self.timeout_s = size, timeout_s
        self._numbers = itertools.count()
        self._processes: list[RankProcess] = []
        self._store, self._port = loopback_store()
        # within the folder of a sweep's worker, which asks for stacks too
        self._folder = Path(tempfile.mkdtemp(prefix="spbench-ranks-", dir=os.environ.get(STACKS_FOLDER)))
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self._environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, STACKS_FOLDER: str(self._folder)}

    def _run(self, job: RankJob) -> list[Any]:
        job = replace(job, number=next(self._numbers))
        self._folder.mkdir(mode=0o700, exist_ok=True)  # a closed pool has none
        while len(self._processes) < self.size:
            place = Rendezvous(_LOOPBACK, self._port)
            self._processes.append(RankProcess(place, len(self._processes), self._environment))
        try:
            for rank, process in enumerate(self._processes[: job.ranks]):
                process.give(job, rank)
            return collect(job.ranks, job.timeout_s, partial(self._next_answer, job.idle_s))
        except RankError as error:
            if error.status == "timeout":
                hung = [self._processes[rank].process.pid for rank in error.silent]
                error.log += stacks_of(self._folder, hung)
            raise
        finally:
            # also after Ctrl-C: no process may be left in the middle of a job
            if any(process.busy for process in self._processes):
                self._kill()

    def close(self) -> None:
        """End the processes; another job starts others."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _next_answer(
        self, idle_s: float | None, waiting: Collection[int], limit_s: float
    ) -> RankAnswer | None:
        by_connection = {self._processes[rank].connection: self._processes[rank] for rank in waiting}
        deadline, work, since = time.monotonic() + limit_s, [""], time.monotonic()
        while not (ready := wait([*by_connection], min(limit_s, _LOOK_S) if idle_s else limit_s)):
            before, work = work, [each.work_so_far() for each in by_connection.values()]
            since = since if work == before and all(work) else time.monotonic()
            if time.monotonic() >= min(deadline, since + (idle_s or limit_s)):
                return None
        return by_connection[ready[0]].answer()  # type: ignore[index]

    def _kill(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []


def loopback_store(port: int = 0) -> tuple[dist.TCPStore, int]:
    """A store that listens only on the loopback interface, and its port; for port 0 the system chooses one.

    A store that opens its socket itself listens on all interfaces.

    Raises:
        UserError: processes of this machine cannot connect on that interface.
    """
    try:
        listening = socket.create_server((_LOOPBACK, port))
        port = listening.getsockname()[1]
        with socket.create_connection((_LOOPBACK, port), _REACHED_S), listening.accept()[0]:
            pass
    except OSError as error:
        raise UserError(
            f"ranks cannot meet at {_LOOPBACK}:{port} ({error.strerror or error}); check that the loopback "
            "interface is up (ip link set lo up) and that the process may open files (ulimit -n)"
        ) from error
    store = dist.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port
