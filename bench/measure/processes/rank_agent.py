"""An agent is what a process becomes that torchrun, or a launcher like it, has started.

An agent starts a process for its rank, hands it the jobs that the coordinator posts
(:mod:`measure.processes.torchrun`), and posts how each job ended. A rank that crashes, hangs or runs out of
memory ends its own process alone; the agent lives on, so the launcher sees no failure and ends no other rank.

Agents and coordinator share one TCPStore: torchrun's own if it has one, else rank 0's. Values are pickles, so
a process that can connect to the store's port can run code here. Its keys:

- ``jobs``: how many jobs have been posted; ``job/K``: a :class:`RankJob`, or None to end the agents;
- ``claimed/K``, ``answer/K/I``: the answers of the agents to job K, in the order in which they came;
- ``over/K``: job K is over, so end its processes; ``stacks/K``: the answers must have their stacks;
- ``left/K``: how many agents have ended on job K; ``left/K/I``: set once at least I agents have;
- ``beat/R``, ``host/R``: a number that agent R changes as long as it lives, and the name of its machine.
"""

import itertools
import math
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import torch.distributed as dist

from spbench.bench.errors import UserError
from spbench.bench.measure.processes.child import when_parent_is_gone
from spbench.bench.measure.processes.rank_pool import RankProcess, Rendezvous
from spbench.bench.measure.processes.stacks import STACKS_FOLDER, RankAnswer, RankJob, stacks_of
from spbench.bench.measure.processes.starting import starting_context

#: seconds between two signs of life of an agent, and seconds without one after which its machine is lost
BEAT_S, LOST_S = 1.0, 15.0
#: seconds between two looks at the store
_POLL_S = 0.05


@dataclass(frozen=True)
class Launched:
    """A process's rank and rendezvous, as its launcher has set them.

    Attributes:
        rank, local_rank: the process's number among all processes, and on its machine.
        agents: how many processes there are.
    """

    rank: int
    local_rank: int
    agents: int
    rendezvous: Rendezvous

    @classmethod
    def here(cls) -> Self:
        """The launch of this process, read from its environment.

        Raises:
            KeyError: no launcher has started it.
            UserError: a variable has a value that no launcher sets.
        """
        env = os.environ
        number = {name: _number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
        if not number["RANK"] < number["WORLD_SIZE"]:
            raise UserError(_NO_LAUNCHER.format(f"RANK={env['RANK']} of WORLD_SIZE={env['WORLD_SIZE']}"))
        # processes that torchrun starts again must not see what the first ones have left in its store
        run = f"spbench/{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        place = Rendezvous(env["MASTER_ADDR"], number["MASTER_PORT"], run)
        return cls(number["RANK"], number["LOCAL_RANK"], number["WORLD_SIZE"], place)


_NO_LAUNCHER = (
    "the environment is that of a process of a launcher, but for {}; start the command with torchrun, or "
    "unset RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
)


def _number(name: str) -> int:
    """The number, at least 0, in an environment variable of a launcher; UserError for another value."""
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()) or (name == "MASTER_PORT" and not 0 < int(text) < 2**16):
        raise UserError(_NO_LAUNCHER.format(f"{name}={text[:40]!r}"))
    return int(text)


def serve(launched: Launched) -> int:
    """Be an agent until the coordinator ends; returns 0.

    If the store or the launcher is gone, the process ends with exit code 1 and a line that says so.
    """
    if launched.rank:  # the agent of rank 0 is no child of the launcher
        when_parent_is_gone(lambda: _leave(launched, "the launcher that has started it is gone"))
    with tempfile.TemporaryDirectory(prefix="spbench-agent-", ignore_cleanup_errors=True) as folder:
        try:
            _Agent(launched, Path(folder)).serve()
        except dist.DistError as error:
            _leave(launched, _LOST_STORE.format(error))
    return 0


_LOST_STORE = "process 0, which writes the results, is gone; the same command goes on where they end ({})"


def _leave(launched: Launched, why: str) -> NoReturn:
    print(
        f"spbench: rank {launched.rank} on {platform.node()} ends: {' '.join(why.split())}", file=sys.stderr
    )
    sys.stderr.flush()
    os._exit(1)  # from any thread; its rank's process ends with it


class _Agent:
    def __init__(self, launched: Launched, folder: Path):
        self.launched, self.folder = launched, folder
        self.store = launched.rendezvous.store()
        self.store.set(f"host/{launched.rank}", platform.node())
        self.process: RankProcess | None = None
        self.leaving = False
        # a connection of its own, because a connection that waits for an answer is blocked
        threading.Thread(target=self._beat, args=(launched.rendezvous.store(),), daemon=True).start()
        starting_context()  # now, while the coordinator reads its scenario

    def serve(self) -> None:
        for number in itertools.count():
            wait_for(self.store, f"job/{number}")
            job: RankJob | None = pickle.loads(self.store.get(f"job/{number}"))
            if job is None:
                break
            if self.launched.rank < job.ranks:
                answer = self._work(job)
                place = self.store.add(f"claimed/{number}", 1) - 1
                self.store.set(f"answer/{number}/{place}", pickle.dumps(answer))  # type: ignore[arg-type]
        self.leaving = True
        self._end_process()
        left = self.store.add(f"left/{number}", 1)
        self.store.set(f"left/{number}/{left}", "")

    def _work(self, job: RankJob) -> RankAnswer:
        """The answer of the rank's process to a job; if the job is over before, the process is ended."""
        if job.fresh:
            self._end_process()
        if self.process is None:
            environment = {**os.environ, STACKS_FOLDER: str(self.folder)}
            self.process = RankProcess(self.launched.rendezvous, self.launched.local_rank, environment)
        process = self.process
        process.give(job, self.launched.rank)
        while not process.connection.poll(_POLL_S):
            if self.store.check([f"over/{job.number}"]):
                wanted = self.store.check([f"stacks/{job.number}"])
                log = stacks_of(self.folder, [process.process.pid]) if wanted else ""
                self._end_process()
                return RankAnswer(self.launched.rank, status="failed", text="ended with its job", log=log)
        answer = process.answer()
        if process.busy:  # dead
            self._end_process()
        return answer  # the process stays until the next job, as other ranks may still read from it

    def _end_process(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None

    def _beat(self, store: dist.Store) -> None:
        """Change this agent's number in the store, as a sign of life; end the agent if the store is gone."""
        while True:
            silence = threading.Timer(LOST_S, self._lost, ["no answer from its store"])
            silence.daemon = True
            silence.start()
            try:
                store.add(f"beat/{self.launched.rank}", 1)  # unlike set it waits for an answer
            except dist.DistError as error:
                self._lost(error)
                return
            silence.cancel()
            time.sleep(BEAT_S)

    def _lost(self, error: object) -> None:
        if not self.leaving:
            _leave(self.launched, _LOST_STORE.format(error))


def wait_for(store: dist.Store, key: str, seconds: float = math.inf) -> bool:
    """Wait for a key of the store; returns whether the key is there within ``seconds``. The store's own wait
    would print a warning if not."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
