"""All ranks of a job in this process, in turns: one computes until it has to wait for another.

Every rank is a thread with process groups of its own, and runs the code that a process would run. The rank
that computes holds a lock, and releases the lock while it waits for a message. So a job has the same result
in every run, and globals of the process, such as torch's default dtype, are one rank's at a time. If all
ranks wait for each other, the job fails at once. These ranks are for values, not for times: 64 ranks need no
processes and no ports, but their times mean nothing.

A sum over ranks adds their tensors one after another, in their order, and rounds to the tensors' dtype each
time, as a ring of NCCL or Gloo does from hop to hop (there each chunk begins at another rank).
"""

# torch's stubs and its C++ differ in the names and the arguments that a group written in Python overrides
# mypy: disable-error-code="override, assignment, call-arg"

import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    FakeProcessGroup,
    _set_thread_isolation_mode,
)
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils._mode_utils import no_dispatch

from spbench.bench.measure.processes.rank_pool import Ranks
from spbench.bench.measure.processes.stacks import RankAnswer, RankJob, collect
from spbench.impls import device_mesh, printed, told

#: how torch.distributed names it
LOCKSTEP = "spbench_lockstep"
#: in-place operators of a reduction over ranks, by dist.ReduceOp
_OPERATORS = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.MAX: lambda x, y: torch.maximum(x, y, out=x),
    dist.ReduceOp.MIN: lambda x, y: torch.minimum(x, y, out=x),
}


class _Board:
    """Messages and collectives in progress among the ranks of a job.

    Attributes:
        lock: held by the rank whose turn it is.
        messages: tensors that are sent but not received, by (group, sender, receiver), ranks of the group.
        meetings: the inputs of a collective by rank, by (group, the collective's number in the group).
    """

    def __init__(self, ranks: int):
        self.lock = threading.Lock()
        self.changed = [threading.Condition(self.lock) for _ in range(ranks)]
        self.messages: defaultdict[Any, deque[Tensor]] = defaultdict(deque)
        self.meetings: defaultdict[Any, dict[int, Any]] = defaultdict(dict)
        self.stuck: dict[int, Callable[[], bool]] = {}
        self.running, self.over = ranks, ""

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let other ranks have turns until ``ready()``; RuntimeError if the job ends before."""
        if ready():
            return
        self.stuck[rank] = ready
        self.check()
        self.changed[rank].wait_for(lambda: self.over or ready())
        del self.stuck[rank]
        if self.over and not ready():
            raise RuntimeError(self.over)

    def tell(self, *ranks: int) -> None:
        """Wake these ranks: each rank checks again whether it has to wait."""
        for rank in ranks:
            self.changed[rank].notify()

    def check(self) -> None:
        """End the job if every remaining rank waits for something that no rank can bring."""
        if len(self.stuck) == self.running and not any(ready() for ready in self.stuck.values()):
            self.end(f"ranks {', '.join(map(str, sorted(self.stuck)))} wait for each other")

    def end(self, why: str) -> None:
        """End the job, with the reason: ranks that wait stop waiting."""
        self.over = self.over or why
        self.tell(*range(len(self.changed)))


#: the board and the rank of the thread that runs, as torch makes groups without arguments of ours
_here = threading.local()


class _Meeting(dist.Work):
    """A collective or a message, complete once ``ready()``; then ``finish`` fills this rank's tensors."""

    def __init__(self, board: _Board, rank: int, ready: Callable[[], bool], finish: Callable[[], object]):
        super().__init__()
        self._board, self._rank, self._ready = board, rank, ready
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta = timedelta()) -> bool:  # immutable
        if self._finish is not None:
            self._board.wait(self._rank, self._ready)
            finish, self._finish = self._finish, None
            with no_dispatch():  # meters see no operator that stands for what a network does
                finish()
        return True

    def is_completed(self) -> bool:
        return self._ready()


class LockstepGroup(dist.ProcessGroup):
    """A process group of ranks in threads of this process; see :mod:`measure.processes.lockstep_ranks`."""

    def __init__(self, place: Any, options: object = None):
        super().__init__(place.group_rank, place.group_size)
        self._board: _Board = _here.board
        self._mine: int = _here.rank
        self._ranks = tuple(place.global_ranks_in_group) or tuple(range(place.group_size))
        self._name, self._number = place.group_id, 0
        self._key = place.group_id, self._ranks
        # torch's fake group is below, so that meters see the operators of collectives
        fake = FakeProcessGroup._create_internal(place.group_rank, place.group_size)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)

    def _meet(
        self, brought: Any, make: Callable[[list[Any]], Any], take: Callable[[Any], object]
    ) -> dist.Work:
        """A collective with this rank's input ``brought``. ``make`` is called once, with the inputs of all
        ranks in order; then each rank calls ``take`` with the result of ``make``."""
        key, size = (self._key, self._number), self.size()
        self._number += 1
        meeting = self._board.meetings[key]
        meeting[self.rank()] = brought
        if len(meeting) == size:
            with no_dispatch():
                meeting[-1] = make([meeting[rank] for rank in range(size)])
            self._board.tell(*self._ranks)
        return _Meeting(self._board, self._mine, lambda: -1 in meeting, lambda: take(meeting[-1]))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (x,), own = tensors, _copied(tensors[0])
        super().allreduce(tensors, opts)
        return self._meet(own, _sum_by(opts), x.detach().copy_)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (x,), own = tensors, _copied(tensors[0])
        super().broadcast(tensors, opts)
        return self._meet(own, lambda all_: all_[opts.rootRank], x.detach().copy_)

    def allgather(self, out: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> dist.Work:
        own = _copied(given[0])
        super().allgather(out, given, opts)
        return self._meet(own, list, lambda parts: _fill(out[0], parts))

    def all_gather_single(self, out: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        own = _copied(given)
        super().all_gather_single(out, given, opts)
        return self._meet(own, list, lambda parts: _fill(out.detach().chunk(len(parts)), parts))

    def reduce_scatter_single(self, out: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        own = _copied(given)
        super().reduce_scatter_single(out, given, opts)
        return self._meet(own, _sum_by(opts), lambda x: _fill([out], [x.chunk(self.size())[self.rank()]]))

    def all_to_all_single(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        own = _copied(given)
        super().all_to_all_single(out, given, out_sizes, given_sizes, opts)
        parts = own.split(given_sizes) if given_sizes else own.chunk(self.size())
        return self._meet(
            parts, list, lambda all_: out.detach().copy_(torch.cat([x[self.rank()] for x in all_]))
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._meet(None, lambda all_: None, lambda nothing: None)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        (x,) = tensors
        super().send(tensors, rank, tag)
        self._board.messages[self._key, self.rank(), rank].append(_copied(x))
        self._board.tell(self._ranks[rank])
        return _Meeting(self._board, self._mine, lambda: True, lambda: None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        (x,) = tensors
        super().recv(tensors, rank, tag)
        arrived = self._board.messages[self._key, rank, self.rank()]
        return _Meeting(
            self._board, self._mine, lambda: bool(arrived), lambda: x.detach().copy_(arrived.popleft())
        )


def _copied(x: Tensor) -> Tensor:
    with no_dispatch():
        return x.detach().clone(memory_format=torch.contiguous_format)


def _fill(out: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for into, part in zip(out, parts, strict=True):
        into.detach().copy_(part)


def _sum_by(opts: Any) -> Callable[[list[Tensor]], Tensor]:
    """A function that reduces the tensors of all ranks, in their order and dtype, as ``opts`` says."""
    operator = _OPERATORS[opts.reduceOp.op if opts else dist.ReduceOp.SUM]

    def reduced(brought: list[Tensor]) -> Tensor:
        total, *others = brought
        for x in others:
            operator(total, x)
        return total

    return reduced


@contextmanager
def _worlds() -> Iterator[None]:
    """A context in which torch.distributed has a world for each thread."""
    if LOCKSTEP not in dist.Backend.backend_list:
        dist.Backend.register_backend(LOCKSTEP, LockstepGroup, extended_api=True, devices=["cpu"])
    threads = torch.get_num_threads()
    threaded._install_threaded_pg()
    _set_thread_isolation_mode(True)  # every rank makes the same names of groups
    torch.set_num_threads(1)  # a sum by several threads rounds differently
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        torch.set_num_threads(threads)


class LockstepRanks(Ranks):
    """Any number of ranks that take turns in this process; their jobs have no time limit."""

    size = 2**16

    def _run(self, job: RankJob) -> list[Any]:
        function, args = pickle.loads(job.work)
        board, answers = _Board(job.ranks), deque[RankAnswer]()
        store = dist.HashStore()

        def act(rank: int) -> None:
            with board.lock:
                _here.board, _here.rank = board, rank
                try:
                    dist.init_process_group(LOCKSTEP, rank=rank, world_size=job.ranks, store=store)
                    answers.append(RankAnswer(rank, function(device_mesh(job.sizes), *args)))
                except BaseException as error:
                    text = printed(error)
                    answers.append(RankAnswer(rank, None, "failed", len(answers) + 1, text, told(error)))
                    board.end(f"rank {rank} failed")
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()
                    board.running -= 1
                    board.check()

        with _worlds():
            threads = [threading.Thread(target=act, args=(rank,)) for rank in range(job.ranks)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        return collect(job.ranks, 0.0, lambda waiting, timeout_s: answers.popleft())

    def close(self) -> None:
        """Do nothing, because no process or connection is open."""
