"""Ranks on the machines of a torchrun job, or of any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT for each process.

Each process that the launcher has started is an agent: it starts a process for its rank, gives it the jobs
that a coordinator posts, and reports what became of it. So a rank that crashes, hangs or runs out of memory
ends with its job, and the launcher, which would end all ranks, sees nothing of it. The coordinator is the
process that runs the command, the one of rank 0, or a worker of its sweep.

All speak through one TCPStore: torchrun's own, where it has one, else rank 0's. Its keys:

- ``jobs``: how many jobs have been posted; ``job/K``: a :class:`Job`, or nothing to end the agents;
- ``claimed/K``, ``answer/K/I``: the answers of the agents to job K, in the order in which they came;
- ``over/K``: job K is over, its processes are to be ended; ``stacks/K``: their stacks are asked for before;
- ``beat/R``, ``host/R``: a number that agent R changes as long as it lives, and the name of its machine.
"""

from __future__ import annotations

import itertools
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spbench.bench.engines.rank_job import GRACE_S, Answer, Job, RankError, collect
from spbench.bench.engines.rank_pool import RankPool, job_of
from spbench.bench.engines.rank_process import RankProcess, Rendezvous
from spbench.bench.processes import (
    STACKS_FOLDER,
    STACKS_S,
    Surroundings,
    end_with_parent,
    interrupts_blocked,
    main_module_hidden,
    starting_context,
    stacks_of,
)
from spbench.impls.layout import Unsupported

#: of the environment, for the workers of rank 0's sweep: the number of agents and the store's address, pickled
AGENTS = "SPBENCH_AGENTS"
#: seconds between two signs of life of an agent, and without one after which its machine is taken for gone
BEAT_S, LOST_S = 1.0, 15.0
#: seconds between two looks of an agent at its process and at whether the job is over
_POLL_S = 0.05
#: seconds that all agents have to be there, before a job of theirs fails
_START_S = 120.0
#: seconds that agents have to leave once they are told to
_LEAVE_S = 20.0


@dataclass(frozen=True)
class Launched:
    """What a launcher says of this process.

    Attributes:
        rank, local_rank: its number among all, and on its machine.
        agents: how many processes there are.
    """

    rank: int
    local_rank: int
    agents: int
    rendezvous: Rendezvous

    @classmethod
    def here(cls) -> Launched | None:
        """What the environment says; None where no launcher has started this process."""
        env = os.environ
        if not all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            return None
        # a group of processes that torchrun starts again must not see what the first has left in its store
        run = f"spbench/{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        place = Rendezvous(env["MASTER_ADDR"], int(env["MASTER_PORT"]), run)
        return cls(int(env["RANK"]), int(env.get("LOCAL_RANK", 0)), int(env["WORLD_SIZE"]), place)


@contextmanager
def coordinating(launched: Launched) -> Iterator[None]:
    """Inside, this process is the coordinator of all agents, of which it starts its own; they end with it."""
    holder = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        holder = dist.TCPStore(
            launched.rendezvous.host, launched.rendezvous.port, is_master=True, wait_for_workers=False
        )
    store = launched.rendezvous.store()
    context = starting_context()
    agent = context.Process(target=_agent, args=(Surroundings(), launched))  # type: ignore[attr-defined]
    with interrupts_blocked(), main_module_hidden():
        agent.start()
    os.environ[AGENTS] = pickle.dumps((launched.agents, launched.rendezvous)).hex()
    try:
        yield
    finally:
        del os.environ[AGENTS]
        number = _post(store, None)
        # the store goes with this process, or soon after it
        with suppress(dist.DistError):
            store.wait([f"left/{number}/{launched.agents}"], timedelta(seconds=_LEAVE_S))
        agent.join(GRACE_S)
        agent.kill()
        del holder


def _agent(surroundings: Surroundings, launched: Launched) -> None:
    """The agent of rank 0, in a process of its own."""
    end_with_parent()
    surroundings.take_on()
    serve(launched)


def _post(store: dist.Store, job: Job | None) -> int:
    """End the job before, if it still runs, and post one; None ends the agents. Returns its number."""
    number = store.add("jobs", 1) - 1
    if number:
        store.set(f"over/{number - 1}", "")
    store.set(f"job/{number}", pickle.dumps(job and replace(job, number=number)))
    return number


def serve(launched: Launched) -> None:
    """Be an agent until the coordinator ends.

    Raises:
        torch.distributed.DistError: the store is gone, and with it the coordinator.
    """
    with tempfile.TemporaryDirectory(prefix="spbench-agent-", ignore_cleanup_errors=True) as folder:
        _Agent(launched, Path(folder)).serve()


class _Agent:
    def __init__(self, launched: Launched, folder: Path):
        self.launched, self.folder = launched, folder
        self.store = launched.rendezvous.store()
        self.store.set(f"host/{launched.rank}", platform.node())
        self.process: RankProcess | None = None
        # a connection of its own, for one that waits is not free for anything else
        beating = threading.Thread(target=_beat, args=(launched.rendezvous.store(), launched.rank), daemon=True)
        beating.start()

    def serve(self) -> None:
        for number in itertools.count():
            job = self._wait_for(number)
            if job is None:
                break
            if self.launched.rank < job.ranks:
                answer = self._work(job)
                place = self.store.add(f"claimed/{number}", 1) - 1
                self.store.set(f"answer/{number}/{place}", pickle.dumps(answer))
        self._end_process()
        left = self.store.add(f"left/{number}", 1)
        self.store.set(f"left/{number}/{left}", "")

    def _wait_for(self, number: int) -> Job | None:
        while True:
            with suppress(dist.DistStoreError):  # nothing is posted yet
                self.store.wait([f"job/{number}"], timedelta(seconds=60))
                job: Job | None = pickle.loads(self.store.get(f"job/{number}"))
                return job

    def _work(self, job: Job) -> Answer:
        """Have the job done, unless it is over before that."""
        if job.fresh:
            self._end_process()
        if self.process is None:
            environment = {**os.environ, STACKS_FOLDER: str(self.folder)}
            self.process = RankProcess(self.launched.rendezvous, self.launched.local_rank, environment)
        process = self.process
        process.send(job, self.launched.rank)
        while not process.connection.poll(_POLL_S):
            if self.store.check([f"over/{job.number}"]):
                wanted = self.store.check([f"stacks/{job.number}"])
                log = stacks_of(self.folder, [process.process.pid]) if wanted else ""
                self._end_process()
                return Answer(self.launched.rank, status="failed", text="ended with its job", log=log)
        answer = process.receive()
        if job.fresh or process.busy:
            self._end_process()
        return answer

    def _end_process(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None


def _beat(store: dist.Store, rank: int) -> None:
    with suppress(dist.DistError):  # the store is gone, which the agent finds out too
        for number in itertools.count():
            store.set(f"beat/{rank}", str(number))
            time.sleep(BEAT_S)


class Agents:
    """The coordinator's end of the agents: runs jobs on their ranks, as :class:`RankPool` does on its own.

    Args:
        size: how many agents there are.
        fresh: whether each job gets new processes.
    """

    def __init__(self, rendezvous: Rendezvous, size: int, fresh: bool):
        self.size, self.fresh = size, fresh
        self._store = rendezvous.store()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held; the agents stay."""

    def run(
        self,
        sizes: Mapping[str, int],
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        device: str = "cpu",
    ) -> list[Any]:
        """As :meth:`RankPool.run`, on the first agents.

        Raises:
            RankError: a rank raised, died, its machine is gone, or it did not answer in time.
            ValueError: the mesh has no such axis, or more ranks than there are agents.
        """
        job = replace(job_of(0, self.size, sizes, function, args, timeout_s, device), fresh=self.fresh)
        number = _post(self._store, job)
        answers = _Answers(self._store, number)
        try:
            return collect(job.ranks, timeout_s, answers.next)
        except RankError as error:
            if error.status == "timeout":
                self._store.set(f"stacks/{number}", "")
                self._store.set(f"over/{number}", "")
                error.log += answers.logs(set(error.silent))
            raise
        finally:
            self._store.set(f"over/{number}", "")


class _Answers:
    """The answers of the agents to a job, one after another."""

    def __init__(self, store: dist.Store, number: int):
        self.store, self.number = store, number
        self.read = 0
        self.beats: dict[int, tuple[bytes, float]] = {}

    def next(self, waiting: Collection[int], timeout_s: float) -> Answer | None:
        """As :func:`collect` asks for it."""
        deadline = time.monotonic() + timeout_s
        while True:
            key, left = f"answer/{self.number}/{self.read}", deadline - time.monotonic()
            with suppress(dist.DistStoreError):  # not there yet
                self.store.wait([key], timedelta(seconds=max(0.001, min(BEAT_S, left))))
                self.read += 1
                answer: Answer = pickle.loads(self.store.get(key))
                return answer
            for rank in waiting:
                if lost := self._lost(rank):
                    return Answer(rank, status="failed", text=lost)
            if left <= 0:
                return None

    def logs(self, silent: set[int]) -> str:
        """What these ranks' agents answer when the job is over, in the order of ranks."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + 2 * STACKS_S + GRACE_S
        while silent and (answer := self.next(silent, deadline - time.monotonic())) is not None:
            silent.discard(answer.rank)
            found[answer.rank] = answer.log or f"-- rank {answer.rank}: {answer.text} --\n"
        return "".join(found[rank] for rank in sorted(found))

    def _lost(self, rank: int) -> str:
        """What is wrong with an agent that shows no sign of life; "" if it does."""
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


def ranks_for(size: int, *, fresh: bool = False) -> RankPool | Agents:
    """What runs jobs of up to that many ranks: the agents of the launcher that has started this process, or
    else processes of this machine.

    Args:
        fresh: each job of the agents gets new processes; those of a pool are as old as the pool.

    Raises:
        Unsupported: there are fewer agents.
    """
    if AGENTS not in os.environ:
        return RankPool(size)
    agents, place = pickle.loads(bytes.fromhex(os.environ[AGENTS]))
    if size > agents:
        raise Unsupported(f"needs {size} ranks, and {agents} were started", "start more with torchrun")
    return Agents(place, agents, fresh)
