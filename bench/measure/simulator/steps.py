"""Steps: a program without the kernels of its compute stream, and where its messages meet their peers'."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spbench.bench.measure.simulator.program import (
    COLLECTIVE,
    COMPUTE_STREAM,
    KERNEL,
    RECORD,
    RECV,
    SEND,
    WAIT,
    Program,
    shifted_ranks,
)


class Steps:
    """A program without the kernels of its compute stream, and the ranks that run it.

    Attributes:
        all_ranks: the global ranks that run the program, in ascending order.
        simulated: the places of the simulated ranks in ``all_ranks``, in ascending order.
        ranks: the global ranks that are simulated.
        at: each step's event in the program; steps are all events except kernels of the compute stream.
        kinds, streams, partners: the fields of each step's event; a wait's partner is the awaited step.
        names: for each step, the index of its name in the program's names.
        nbytes: bytes of each step's payload.
        at_once: for each send, the number of peers to which sends are posted together with it (with only
            other posts between them). Sends to the same peer go one after another.
    """

    def __init__(self, program: Program, all_ranks: np.ndarray, simulated: np.ndarray):
        self.program, self.all_ranks, self.simulated = program, all_ranks, simulated
        self.ranks = all_ranks[simulated]
        self.at = np.flatnonzero((program.kind != KERNEL) | (program.stream != COMPUTE_STREAM))
        step_of = np.full(len(program), -1)
        step_of[self.at] = np.arange(len(self.at))
        self.kinds: list[int] = program.kind[self.at].tolist()
        self.streams: list[int] = program.stream[self.at].tolist()
        partner = program.partner[self.at]
        waits = program.kind[self.at] == WAIT
        partner[waits] = step_of[partner[waits]]
        self.partners: list[int] = partner.tolist()
        self.names: list[int] = program.name[self.at].tolist()
        self.nbytes: list[float] = program.nbytes[self.at].tolist()
        self.at_once = self._peers_at_once()

    def __len__(self) -> int:
        return len(self.kinds)

    def index(self, who: np.ndarray) -> Any:
        """The index of the simulated ranks ``who`` in arrays with one entry for each rank. For a single rank
        the index is a number, because arithmetic on numbers takes less time than on arrays of one."""
        if len(self.ranks) == 1:
            return 0
        return slice(None) if len(who) == len(self.ranks) else who

    @cached_property
    def larger(self) -> Callable[[Any, Any], Any]:
        """A function that returns the larger of two times (numbers or arrays, as of :meth:`index`)."""
        return max if len(self.ranks) == 1 else np.maximum

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The attributes ``kinds``, ``streams`` and ``partners`` as arrays, each [steps]."""
        kinds, streams, partners = (
            np.array(x, dtype=np.int64) for x in (self.kinds, self.streams, self.partners)
        )
        return kinds, streams, partners

    def _peers_at_once(self) -> list[int]:
        kinds = self.program.kind[self.at]
        posts, sends = (kinds == SEND) | (kinds == RECV), kinds == SEND
        # a batch goes on where a post follows another with no event between them
        follows = np.diff(self.at, prepend=-2) == 1
        follows[1:] &= posts[:-1]
        batch = np.cumsum(posts & ~follows)[sends]
        partners = np.array(self.partners, dtype=np.int64)[sends]
        many = len(self.program.peers) or 1
        different = np.unique(batch * many + partners) // many
        at_once = np.ones(len(kinds), dtype=np.int64)
        at_once[sends] = np.bincount(different, minlength=1)[batch]
        return at_once.tolist()

    def peers(self, peer: int) -> np.ndarray:
        """[all_ranks]: each rank's peer, as a global rank. ``peer``: the peer's index in the program."""
        return shifted_ranks(self.all_ranks, self.program.peers[peer], self.program.mesh)

    def beside_computing(self, asked: bool) -> list[list[int]]:
        """For each step that is a wait of the compute stream, the steps (collectives and sends) for which it
        is the first such wait, directly or by a record of another stream; empty for other steps. An exchange,
        whose two directions are one kernel, counts once, by its send, which is waited for first. If not
        ``asked``, all lists are empty."""
        awaited: list[list[int]] = [[]] * len(self)  # one shared list, which stays empty
        if not asked:
            return awaited
        #: for each stream, the steps for which the compute stream has not waited yet
        ahead: dict[int, list[int]] = defaultdict(list)
        kinds, streams, partners = self.columns
        waits = (kinds == WAIT) & (streams == COMPUTE_STREAM)
        waits[waits] = np.isin(kinds[partners[waits]], (COLLECTIVE, SEND, RECORD))
        for step in np.flatnonzero(np.isin(kinds, (COLLECTIVE, SEND)) | waits).tolist():
            kind, stream = self.kinds[step], self.streams[step]
            if kind in (COLLECTIVE, SEND):
                ahead[stream].append(step)
            else:
                partner = self.partners[step]
                posted = ahead[self.streams[partner]]
                if self.kinds[partner] == RECORD:
                    awaited[step] = [each for each in posted if each < partner]
                elif partner in posted:
                    awaited[step] = [partner]
                posted[:] = [each for each in posted if each not in awaited[step]]
        return awaited

    def describe(self, step: int, local: int) -> str:
        """A step in words, with the global rank of the simulated rank at the position ``local``."""
        rank = int(self.ranks[local])
        return f"rank {rank}, {self.program.describe(int(self.at[step]), rank)}"


@dataclass(frozen=True)
class Meeting:
    """How a program's sends to a peer (or receives from it) meet the receives (or sends) of another program.

    Attributes:
        program: the number of the other program.
        halves: by step, the step in the other program that it meets.
        theirs: for each simulated rank's position, the position of its peer in the other program, or -1.
        everyone: whether all simulated ranks of both programs meet.
        back: if ``everyone``, for each position in the other program, the position in this program.
    """

    program: int
    halves: dict[int, int]
    theirs: np.ndarray
    everyone: bool
    back: np.ndarray
