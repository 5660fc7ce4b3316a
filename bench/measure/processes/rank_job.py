"""Jobs of ranks, their answers, and which of several failures is the cause. Does not import torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spbench.impls import loose_files

#: of the environment, for the workers of rank 0's sweep: the number of agents and where the store is, pickled
AGENTS = "SPBENCH_AGENTS"

#: after one rank failed, seconds that the others have to notice it before they are killed
GRACE_S = 5.0

#: how the reason begins where ranks have not answered in time
NO_END = "no end within its limit of"

#: of a cell whose ranks failed; a subset of :data:`spbench.bench.measurement.Status`
Fate = Literal["failed", "oom", "timeout"]


class RankError(RuntimeError):
    """A rank raised, ran out of memory, died or did not answer; the text holds the rank and its traceback.

    Attributes:
        status: of the cell that the ranks ran.
        reason: one line: the rank and what it raised, or who did not answer in time.
        silent: the ranks that had not answered by then.
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
        sizes: ranks along every axis of the mesh, in its order.
        device: type of the devices on which tensors are: "cpu" or "cuda".
        backend: of torch.distributed.
        timeout_s: after so many seconds the job has failed.
        work: a function of a module and its arguments, pickled; it is called with the mesh before these.
        fresh: whether processes are started for this job alone.
        files: those of users that the work may need (:func:`loose_files.digests`).
    """

    number: int
    sizes: dict[str, int]
    device: str
    backend: str
    timeout_s: float
    work: bytes
    fresh: bool = False
    files: Mapping[str, str] = field(default_factory=loose_files.digests)

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return math.prod(self.sizes.values())


@dataclass(frozen=True)
class RankAnswer:
    """What a rank made of a job.

    Attributes:
        value: what the function returned; None unless status is ok.
        place: in the order in which ranks failed; 0 for a rank that died, which cannot count itself.
        text: a traceback, or what happened.
        raised: type and message of what it raised; "" if it raised nothing.
        log: its stacks and last collectives, if it was ended and these were asked for.
    """

    rank: int
    value: Any = None
    status: Literal["ok", "failed", "oom"] = "ok"
    place: int = 0
    text: str = ""
    raised: str = ""
    log: str = ""


def collect(
    ranks: int, timeout_s: float, next_answer: Callable[[Collection[int], float], RankAnswer | None]
) -> list[Any]:
    """What each rank returned, by rank.

    Args:
        next_answer: called with the ranks that have not answered and seconds; returns the answer of one of
            them, or None if there is none in that time.

    Raises:
        RankError: a rank failed, or did not answer in time. Of several failures the first is the cause: the
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
        what = f"{NO_END} {timeout_s:g} s, no answer from {ranks_named}"
        raise RankError(min(waiting), what, "timeout", sorted(waiting))
    return values
