"""Steps: a program without the kernels of its compute stream, and where its messages meet their peers'.

The host's clock of each rank: when the process that launches a rank's kernels comes to each kernel.

A host works through the program's events in order: first its own work since the event before, as
:attr:`Program.host` counts it, then the event's dispatch. A kernel starts after the kernels before it on its
stream, and at the earliest a launch latency after its dispatch; communication is posted no sooner either.
Where the host waits for its device (a join), its clock continues from the compute stream's clock. The host is
a limited number of launches ahead: at the end of each piece of a program (:data:`PIECE`) it waits until the
device has begun the kernel that many launches before. At a check of its queue (:data:`HOST_WORK`) it waits
until the compute stream has ended what it had before the check :data:`CHECKS_AHEAD` checks earlier.

Between two steps of a simulation the compute stream runs only kernels. Their effect on both clocks is a map
of sums and maxima that is computed once, so that a step costs the same however many kernels come before it:
stream' = max(stream + T, host + M), host' = host + H. T is the seconds of the kernels, H those of the host,
and M the longest path through both: on the host up to the launch of some kernel, then on the stream.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spbench.bench.measure.clusters.rates import Host
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, HOST_WORK, Kind, Program, shifted_ranks


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
        self.at = np.flatnonzero((program.kind != Kind.KERNEL) | (program.stream != COMPUTE_STREAM))
        step_of = np.full(len(program), -1)
        step_of[self.at] = np.arange(len(self.at))
        partner = program.partner[self.at]
        waits = program.kind[self.at] == Kind.WAIT
        partner[waits] = step_of[partner[waits]]
        #: the attributes ``kinds``, ``streams`` and ``partners`` as arrays, each [steps]
        self.columns = *(each[self.at].astype(np.int64) for each in (program.kind, program.stream)), partner
        self.kinds, self.streams, self.partners = (column.tolist() for column in self.columns)
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

    def _peers_at_once(self) -> list[int]:
        kinds = self.program.kind[self.at]
        posts, sends = (kinds == Kind.SEND) | (kinds == Kind.RECV), kinds == Kind.SEND
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
        waits = (kinds == Kind.WAIT) & (streams == COMPUTE_STREAM)
        waits[waits] = np.isin(kinds[partners[waits]], (Kind.COLLECTIVE, Kind.SEND, Kind.RECORD))
        for step in np.flatnonzero(np.isin(kinds, (Kind.COLLECTIVE, Kind.SEND)) | waits).tolist():
            kind, stream = self.kinds[step], self.streams[step]
            if kind in (Kind.COLLECTIVE, Kind.SEND):
                ahead[stream].append(step)
            else:
                partner = self.partners[step]
                posted = ahead[self.streams[partner]]
                if self.kinds[partner] == Kind.RECORD:
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
    """

    program: int
    halves: dict[int, int]
    theirs: np.ndarray


#: the most events between two points at which the host waits for a device that is too far behind
PIECE = 128
_FIGURES = dict(zip(HOST_WORK, ("view_s", "node_s", "module_s", "", ""), strict=True))
_JOINS, _CHECKS = HOST_WORK.index("joins"), HOST_WORK.index("checks")
#: a host is so many checks ahead of its device at most
CHECKS_AHEAD = 3
#: the M (see above) of events without a kernel of the compute stream
_NO_KERNEL = float("-inf")


def host_seconds(host: Host, program: Program, graphs: str = "none") -> np.ndarray:
    """[events]: the host's seconds for each event: the work since the event before, and the dispatch.

    Args:
        graphs: the events of forward and backward that CUDA graphs launch, for which the host has no work:
            "none", the kernels ("layers"), or all ("full_iteration").
    """
    kinds = program.kind
    dispatch = np.where(kinds == Kind.KERNEL, host.seconds("operator_s"), host.seconds("collective_s"))
    dispatch[(kinds == Kind.WAIT) | (kinds == Kind.RECORD)] = 0.0
    each = np.array([host.seconds(figure) if figure else 0.0 for figure in _FIGURES.values()])
    seconds: np.ndarray = dispatch + program.host @ each
    if graphs != "none":
        ends = [first for _, first in program.marks[1:]]
        for (phase, first), end in zip(program.marks, [*ends, len(program)], strict=True):
            if phase in ("forward", "backward"):
                seconds[first:end][(kinds[first:end] == Kind.KERNEL) | (graphs == "full_iteration")] = 0.0
    return seconds


class HostClock:
    """The hosts of the simulated ranks that run a program.

    Args:
        costs: the costs of a cluster with figures of its hosts.
        taken: [events]: seconds of each kernel, with the gap after the kernel.
        work: [events]: see :func:`host_seconds`.

    Attributes:
        now: [ranks]: the clock of each rank's host, in seconds.
        latency: seconds of a launch.
    """

    def __init__(self, costs: Costs, steps: Steps, taken: np.ndarray, work: np.ndarray):
        program, host = steps.program, costs.host
        assert host is not None
        self.latency, self.work = host.seconds("launch_latency_s"), work
        self._begun = host.seconds("step_s")
        self.now, self._larger = np.full(len(steps.ranks), self._begun), steps.larger
        on_compute = (program.kind == Kind.KERNEL) & (program.stream == COMPUTE_STREAM)
        joins = (program.host[:, _JOINS] > 0) | (on_compute & host.synchronous)
        checks = program.host[:, _CHECKS] > 0
        cut = np.append(joins | checks, True)
        cut[::PIECE] = True
        cut[steps.at + 1] = True
        #: the first event of each piece, then the number of events
        self.cuts = np.flatnonzero(cut)
        first, end = self.cuts[:-1], self.cuts[1:]
        host_s = np.concatenate([[0.0], np.cumsum(self.work)])
        kernels_s = np.concatenate([[0.0], np.cumsum(np.where(on_compute, taken, 0.0))])
        launched = np.concatenate([[0], np.cumsum(on_compute)])
        through = np.where(on_compute, host_s[1:] - kernels_s[:-1], _NO_KERNEL)
        if len(first):
            through = np.maximum.reduceat(through, first) + kernels_s[end] - host_s[first] + self.latency
        allowed = launched[end] - (host.launches_ahead.value or launched[-1] + 1)
        behind = np.searchsorted(launched[end], allowed, side="right") - 1
        ended = np.flatnonzero(checks[first]) - 1  # the pieces after which there is a check
        np.maximum.at(behind, ended[CHECKS_AHEAD:], ended[:-CHECKS_AHEAD])
        behind = np.maximum.accumulate(behind)
        others = np.diff(behind, prepend=-1) != 0
        waited_for = behind[others]
        #: [pieces for which a host waits, ranks]: when the compute stream has ended the piece
        self._done = np.zeros((len(waited_for), len(steps.ranks)))
        noted = np.full(len(first), -1)
        noted[waited_for] = np.arange(len(waited_for))
        self._behind = np.cumsum(others) - 1
        #: for each piece: whether the host waits for the compute stream before the piece; T, H and M; the row
        #: of ``_done`` that gets the piece's end (-1: no host waits for it); the row of the piece which the
        #: device must have ended before the host ends this piece (-1: none, or waited for before)
        taken_s, of_host_s = np.diff(kernels_s[self.cuts]), np.diff(host_s[self.cuts])
        columns = joins[first], taken_s, of_host_s, through, noted, np.where(others, self._behind, -1)
        self._pieces = list(zip(*(column.tolist() for column in columns), strict=True))
        #: the first of the pieces before each step, then the first piece after the last step, then the end
        before = np.searchsorted(steps.at, first)
        self._first_of = np.searchsorted(before, np.arange(len(steps) + 2)).tolist()

    def reach(
        self, step: int, stream: np.ndarray, host: np.ndarray, who: slice | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(stream, host): the clocks of ranks' compute streams and hosts when the host has dispatched a step,
        from their clocks after the step before. ``who``: the ranks."""
        first, end, larger = self._first_of[step], self._first_of[step + 1], self._larger
        for joins, kernels_s, host_s, through_s, noted, behind in self._pieces[first:end]:
            if joins:
                host = larger(host, stream)
            if through_s != _NO_KERNEL:  # without a kernel the stream's clock stays
                stream = larger(stream + kernels_s, host + through_s)
            if host_s:
                host = host + host_s
            if noted >= 0:
                self._done[noted, who] = stream
            if behind >= 0:
                host = larger(host, self._done[behind, who])
        return stream, host

    def of_rank(self, place: int) -> Callable[[int, float], float]:
        """A function for one simulated rank that returns the earliest start of an event in seconds. Call it
        for each event in order, with the event and the compute stream's clock before the event."""
        joins = (piece[0] for piece in self._pieces)
        begins = dict(zip(self.cuts.tolist(), zip(joins, self._behind.tolist(), strict=True), strict=False))
        host, behind = self._begun, -1

        def launched(event: int, stream: float) -> float:
            nonlocal host, behind
            if event in begins:
                if behind >= 0:
                    host = max(host, float(self._done[behind, place]))
                joined, behind = begins[event]
                if joined:
                    host = max(host, stream)
            host += float(self.work[event])
            return host + self.latency

        return launched


def posted_late(steps: Steps, reached: np.ndarray, left: np.ndarray) -> np.ndarray:
    """[ranks]: the seconds in which a rank's compute stream waits for communication that the rank's host has
    not posted yet.

    Args:
        reached, left: [steps, ranks]: when a step's stream reaches the step, and leaves a wait, in seconds.
    """
    kinds, streams, partners = steps.columns
    waits = np.flatnonzero((kinds == Kind.WAIT) & (streams == COMPUTE_STREAM))
    waits = waits[(streams[partners[waits]] == COMPUTE_STREAM) & (kinds[partners[waits]] != Kind.RECORD)]
    late = reached[partners[waits]] - reached[waits]
    seconds: np.ndarray = np.clip(late, 0.0, left[waits] - reached[waits]).sum(0)
    return seconds
