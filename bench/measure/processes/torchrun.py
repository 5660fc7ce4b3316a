"""Ranks on the machines of a torchrun job, or of any launcher that sets RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT for each process: the coordinator's side.

The coordinator is the process of rank 0, which runs the command, or a worker of its sweep. The launcher's
other processes become agents (:mod:`measure.processes.rank_agent`), on which jobs run.
"""

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from spbench.bench.errors import UserError
from spbench.bench.measure.processes import stacks
from spbench.bench.measure.processes.child import Child, when_parent_is_gone
from spbench.bench.measure.processes.rank_agent import BEAT_S, LOST_S, Launched, serve, wait_for
from spbench.bench.measure.processes.rank_pool import RankPool, Ranks, Rendezvous, loopback_store
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.impls import Unavailable

#: seconds that an agent has to appear before a job of its rank fails
_START_S = 120.0
#: seconds that agents have to end after they are told to end
_LEAVE_S = 10.0


def run_launched(command: Callable[[], int]) -> int:
    """Run a process that torchrun, or a launcher like it, has started; returns its exit code. The first
    process runs the command, on the ranks of all processes; each other process runs its rank.

    Raises:
        UserError: the launcher's variables are no ranks, or processes cannot connect at its address.
    """
    launched = Launched.here()
    if launched.rank:
        return serve(launched)
    with coordinating(launched):
        return command()


@contextmanager
def coordinating(launched: Launched) -> Iterator[None]:
    """A context in which this process coordinates all agents and starts rank 0's; at its end all agents end.

    Raises:
        KeyboardInterrupt: the launcher is gone.
        UserError: processes cannot connect at the launcher's address.
    """
    holder = None
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            holder = _listening(launched.rendezvous)
        store = launched.rendezvous.store()
    except (OSError, dist.DistError) as error:
        place = f"MASTER_ADDR={launched.rendezvous.host} MASTER_PORT={launched.rendezvous.port}"
        raise UserError(f"ranks cannot meet at {place}: {str(error).splitlines()[0]}") from error
    agent = Child(_be_agent, launched)
    os.environ[stacks.AGENTS] = pickle.dumps((launched.agents, launched.rendezvous)).hex()
    when_parent_is_gone(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        del os.environ[stacks.AGENTS]
        with suppress(dist.DistError):  # the store is gone with the launcher
            number = _post(store, None)
            wait_for(store, f"left/{number}/{launched.agents}", _LEAVE_S)  # it may end with this process
        agent.end(stacks.GRACE_S)
        del holder


def _listening(place: Rendezvous) -> dist.TCPStore:
    """The store for all agents, only on the loopback interface if the launcher's address is there."""
    if ip_address(socket.gethostbyname(place.host)).is_loopback:
        return loopback_store(place.port)[0]
    return dist.TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)


def _be_agent(connection: Connection, launched: Launched) -> None:
    """Act as the agent of rank 0, in a process of its own, which gets its jobs only through the store."""
    when_parent_is_gone()
    serve(launched)


def _post(store: dist.Store, job: stacks.RankJob | None) -> int:
    """End the previous job, and post ``job``, or None to end the agents; returns the job's number."""
    number = store.add("jobs", 1) - 1
    if number:
        store.set(f"over/{number - 1}", "")
    store.set(f"job/{number}", pickle.dumps(job and replace(job, number=number)))  # type: ignore[arg-type]
    return number


class Agents(Ranks):
    """The agents, of which the first run a job's ranks. A rank on a lost machine counts as failed.

    Args:
        size: how many agents there are.
        fresh: whether each job gets new processes.
    """

    def __init__(self, rendezvous: Rendezvous, size: int, fresh: bool):
        self.size, self.fresh = size, fresh
        self._store = rendezvous.store()

    def close(self) -> None:
        """Do nothing: the agents stay for the next jobs."""

    def _run(self, job: stacks.RankJob) -> list[Any]:
        try:
            return self._answers_to(replace(job, fresh=self.fresh))
        except dist.DistError as error:
            raise stacks.RankError(0, "the launcher that holds the ranks' store is gone") from error

    def _answers_to(self, job: stacks.RankJob) -> list[Any]:
        number = _post(self._store, job)
        answers = _Answers(self._store, number)
        try:
            return stacks.collect(job.ranks, job.timeout_s, answers.next)
        except stacks.RankError as error:
            if error.status == "timeout":
                self._store.set(f"stacks/{number}", "")
                self._store.set(f"over/{number}", "")
                error.log += answers.logs(set(error.silent))
            raise
        finally:
            self._store.set(f"over/{number}", "")


class _Answers:
    """Reads the answers of the agents to a job from the store, one after another."""

    def __init__(self, store: dist.Store, number: int):
        self.store, self.number = store, number
        self.read = 0
        self.beats: dict[int, tuple[bytes, float]] = {}

    def next(self, waiting: Collection[int], timeout_s: float) -> stacks.RankAnswer | None:
        """The next answer of a rank, for :func:`collect`; None after ``timeout_s`` seconds without one."""
        deadline = time.monotonic() + timeout_s
        while True:
            key, left = f"answer/{self.number}/{self.read}", deadline - time.monotonic()
            if wait_for(self.store, key, min(BEAT_S, left)):
                self.read += 1
                answer: stacks.RankAnswer = pickle.loads(self.store.get(key))
                return answer
            for rank in waiting:
                if lost := self._lost(rank):
                    return stacks.RankAnswer(rank, status="failed", text=lost)
            if left <= 0:
                return None

    def logs(self, silent: set[int]) -> str:
        """The logs that the agents of ``silent`` ranks send once the job is over, in the order of ranks."""
        logs: dict[int, str] = {}
        deadline = time.monotonic() + 3 * stacks.STACKS_S + stacks.GRACE_S
        while silent and (answer := self.next(silent, deadline - time.monotonic())) is not None:
            silent.discard(answer.rank)
            logs[answer.rank] = answer.log or f"-- rank {answer.rank}: {answer.text} --\n"
        return "".join(logs[rank] for rank in sorted(logs))

    def _lost(self, rank: int) -> str:
        """Why an agent without a sign of life counts as lost; "" if it does not."""
        key, now = f"beat/{rank}", time.monotonic()
        beat = self.store.get(key) if self.store.check([key]) else b""
        before, since = self.beats.setdefault(rank, (beat, now))
        if beat != before:
            self.beats[rank] = (beat, now)
        elif not beat and now - since > _START_S:
            return f"its process has not come within {_START_S:g} s"
        elif beat and now - since > LOST_S:
            host = self.store.get(f"host/{rank}").decode()
            return f"no sign of life from its machine, {host}, for {LOST_S:g} s"
        return ""


def check_gpus(ranks: int, device: str) -> None:
    """Refuse to run more ranks on GPUs than this machine has GPUs. Agents bring GPUs of their own.

    Raises:
        Unavailable: there are fewer GPUs; the text says how many.
    """
    if device == "cuda" and stacks.AGENTS not in os.environ and ranks > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise Unavailable(f"needs {ranks} GPUs, and this machine has {there}", "start it with torchrun")


def shared_backend(ranks: int, device: str) -> str:
    """:data:`STAGED` for ranks that must share this machine's GPUs, "" (the usual backend) for all others.

    Nothing should be timed on the staged backend.

    Raises:
        Unavailable: ``device`` is "cuda", and this machine has no GPU.
    """
    check_gpus(1, device)
    try:
        check_gpus(ranks, device)
    except Unavailable:
        return STAGED
    return ""


def ranks_for(size: int, *, fresh: bool = False) -> Ranks:
    """Ranks for jobs of up to ``size`` ranks: agents, if a launcher has started this process, else a pool.

    Args:
        fresh: whether each job of the agents gets new processes; a pool keeps its processes.

    Raises:
        Unavailable: there are fewer than ``size`` agents.
    """
    if stacks.AGENTS not in os.environ:
        return RankPool(size)
    agents, place = pickle.loads(bytes.fromhex(os.environ[stacks.AGENTS]))
    if size > agents:
        raise Unavailable(f"needs {size} ranks, and {agents} were started", "start more with torchrun")
    return Agents(place, agents, fresh)
