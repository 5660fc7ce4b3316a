"""The state of a simulation while it runs, and its result: the step time, and the parts of the step time.

:meth:`Timeline.export` writes a timeline as Chrome trace JSON for Perfetto (https://ui.perfetto.dev).
Each rank is a process with rows for the phases, the compute stream, communication (several rows if transfers
overlap, since slices of one row may not overlap partly), and each further stream. The format: Trace Event
Format, complete events ("ph": "X"), times in microseconds.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spbench.bench.files import write_whole
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.lighter_ranks import unlike_work
from spbench.bench.measure.simulator.message_matching import Channels, World
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, Flops, Kind, flops_of, seconds_by_kind
from spbench.bench.measure.simulator.steps import HostClock, host_seconds
from spbench.bench.measure.simulator.substitutes import Substitute, seconds_by_substitute
from spbench.bench.measure.simulator.waits import Event, Times, Waits, rank_events, waits_of


class SimulationState:
    """When each rank reaches and leaves the steps of its program, as far as the simulation has come.

    Arrays are [steps, simulated ranks of the program] in seconds; nan: not known yet.

    Args:
        unlike_axis: see :class:`Simulator`.
    """

    def __init__(self, world: World, costs: Costs, unlike_axis: int | None = None):
        self.world, self.steps = world, world.steps
        self.works = unlike_work(world.steps, unlike_axis)
        shapes = [(len(s), len(s.ranks)) for s in self.steps]
        #: when a stream reaches a step, and leaves a wait; when communication, or a kernel of a further
        #: stream, starts and ends
        self.reached, self.left, self.start, self.end = (
            [np.full(shape, np.nan) for shape in shapes] for _ in range(4)
        )
        #: for each step, how many ranks have posted the step, and for how many its end is known
        self.posted, self.ended = ([[0] * len(s) for s in self.steps] for _ in range(2))
        #: [streams, ranks of the program]: when each stream has done all events issued so far
        self.clocks = [np.zeros((max(s.streams, default=0) + 1, len(s.ranks))) for s in self.steps]
        self.kernel_s = [costs.kernels(steps.program) for steps in self.steps]
        host = costs.host
        launched = [None if host is None else host_seconds(host, s.program, costs.graphs) for s in self.steps]
        self.costs = costs
        #: by step: its seconds if it is a kernel, and the seconds of the compute stream's kernels before it
        self.taken: list[list[float]] = []
        self.before: list[list[float]] = []
        self.hosts: list[HostClock | None] = []
        for steps, seconds, work in zip(self.steps, self.kernel_s, launched, strict=True):
            program = steps.program
            taken = np.where(program.kind == Kind.KERNEL, seconds + costs.launch_s, 0.0)
            spent = np.concatenate([[0.0], np.cumsum(np.where(program.stream == COMPUTE_STREAM, taken, 0.0))])
            self.taken.append(taken[steps.at].tolist())
            self.hosts.append(None if work is None else HostClock(costs, steps, taken, work))
            self.before.append(np.diff(spent[steps.at], prepend=0.0, append=spent[-1]).tolist())
        self.losses = [steps.beside_computing(bool(costs.overlap_loss)) for steps in self.steps]
        self.channels = Channels(world, costs)


@dataclass(frozen=True)
class _Set:
    """Ranks that do the same share of a program's work; other arrays are [simulated ranks], in seconds.

    Attributes:
        ranks: the global ranks.
        at: for each of ``ranks``, its place in the arrays of simulated ranks.
        weights: [events]: the share (0 to 1) of each event that the ranks do.
        kernel_s: [events]: the seconds of this share of each kernel.
        waits: see :class:`Waits`.
        computed: when the compute stream ends.
        late_host: by how much the host ends after the full work's compute stream; None: hosts take no time.
    """

    ranks: np.ndarray
    at: np.ndarray
    weights: np.ndarray
    kernel_s: np.ndarray
    waits: Waits
    computed: np.ndarray
    late_host: np.ndarray | None


class Timeline:
    """The result of a simulated step.

    Attributes:
        step_time_s: seconds until all ranks' computing and communication end, plus the step's overhead.
    """

    def __init__(self, state: SimulationState):
        self._world, self._costs, self._kernel_s = state.world, state.costs, state.kernel_s
        self._reached, self._left, self._start, self._end = state.reached, state.left, state.start, state.end
        self._hosts, self._works = state.hosts, state.works
        self._computed = computed = [clocks[COMPUTE_STREAM] for clocks in state.clocks]
        last = [float(c.max()) for c in computed]
        last += [float(np.nanmax(e)) for e in state.end if e.size and not np.isnan(e).all()]
        last += [float(host.now.max()) for host in state.hosts if host is not None]
        self.step_time_s = max(last) + self._costs.step_overhead_s

    @property
    def world_size(self) -> int:
        return self._world.size

    @cached_property
    def by_rank(self) -> dict[str, np.ndarray]:
        """The parts of each rank's step, in seconds: by name of the part, an array [global ranks].

        compute: kernels of the compute stream by the roofline, each at least the cluster's floor. overhead:
        launches of these kernels, and the step's own overhead. exposed_communication: waits while bytes move,
        or while another stream copies them. bubble: waits for other ranks to take part, or to end. host (only
        if the cluster has figures of hosts): waits for the rank's host. These parts add up to the step time.
        hidden_communication: bytes move, or another stream copies, while the rank computes.
        """
        parts = {
            name: np.zeros(self._world.size)
            for name in ("compute", "exposed_communication", "bubble", "overhead", "hidden_communication")
        }
        step_overhead = self._costs.step_overhead_s
        for number, some in self._sets:
            program, waits = self._world.steps[number].program, some.waits
            kernels = (program.kind == Kind.KERNEL) & (program.stream == COMPUTE_STREAM)
            worked = np.where(kernels, some.kernel_s, 0.0).sum()
            launched = int((kernels & (some.weights > 0)).sum()) * self._costs.launch_s
            parts["compute"][some.ranks] = worked
            parts["overhead"][some.ranks] = launched + step_overhead
            parts["exposed_communication"][some.ranks] = waits.exposed[some.at]
            bubble = waits.waited - waits.exposed + self.step_time_s - step_overhead - some.computed
            hidden = np.maximum(waits.busy - waits.exposed, 0.0)
            parts["hidden_communication"][some.ranks] = hidden[some.at]
            if some.late_host is not None:
                late = waits.late + some.late_host
                bubble = bubble - late
                stalled = np.maximum(some.computed - worked - launched - waits.waited, 0.0) + late
                parts.setdefault("host", np.zeros(self._world.size))[some.ranks] = stalled[some.at]
            parts["bubble"][some.ranks] = bubble[some.at]
        return parts

    @cached_property
    def _sets(self) -> list[tuple[int, _Set]]:
        """(the number of a program, a set of ranks that do the same share of it), for all ranks."""
        return [
            (number, self._set(number, *alike))
            for number, (steps, work) in enumerate(zip(self._world.steps, self._works, strict=True))
            for alike in ([(steps.all_ranks, None)] if work is None else work.alike())
        ]

    def _set(self, number: int, ranks: np.ndarray, coordinate: int | None) -> _Set:
        steps, host = self._world.steps[number], self._hosts[number]
        places, at = np.unique(self._world.place_of[ranks], return_inverse=True)
        columns = slice(None) if len(places) == len(steps.ranks) else places
        times, computed, weights = self._played(number, coordinate, columns)
        waits = waits_of(steps, self._costs, times, host is not None, places)
        heaviest = self._computed[number][columns]
        late = None if host is None else np.maximum(host.now[columns] - heaviest, 0.0)
        kernel_s = self._kernel_s[number] * weights
        return _Set(ranks, at.ravel(), weights, kernel_s, waits, computed, late)

    def _played(
        self, number: int, coordinate: int | None, columns: slice | np.ndarray
    ) -> tuple[Times, np.ndarray, np.ndarray]:
        """(the times of some simulated ranks at their steps, when their compute streams end, [events] the
        share of each event that they do). ``coordinate``: see :data:`Alike`; ``columns``: the ranks."""
        steps, work = self._world.steps[number], self._works[number]
        arrays = (self._reached, self._left, self._start, self._end)
        times = Times(*(each[number][:, columns] for each in arrays))
        computed = self._computed[number][columns]
        if work is None or coordinate in (None, work.last):
            return times, computed, np.ones(len(steps.program))
        taken = np.where(
            steps.program.kind == Kind.KERNEL, self._kernel_s[number] + self._costs.launch_s, 0.0
        )
        return *work.times(coordinate, taken, times, computed), work.weights(coordinate)

    @property
    def parts(self) -> dict[str, float]:
        """The parts of ``compute`` and ``exposed_communication`` of :attr:`by_rank` in seconds, as means over
        ranks. matmul_s, attention_s, memory_bound_s: kernels by kind. intra_node_s, inter_node_s: waits for
        communication by its links; waits for copies on other streams count as intra-node. in_blocks_s (only
        if the calibration has this charge): the part of matmuls charged for blocks of wider matrices.
        """
        kinds = {name: np.zeros(self._world.size) for name in ("matmul", "attention", "memory_bound")}
        exposed = {name: np.zeros(self._world.size) for name in ("intra_node", "inter_node")}
        for number, some in self._sets:
            program, waits = self._world.steps[number].program, some.waits
            for name, seconds in seconds_by_kind(program, some.kernel_s).items():
                kinds[name][some.ranks] = seconds
            if charge := self._costs.calibration.strided_element_s:
                in_blocks = kinds.setdefault("in_blocks", np.zeros(self._world.size))
                in_blocks[some.ranks] = charge * (program.strided * some.weights).sum()
            exposed["intra_node"][some.ranks] = (waits.exposed - waits.across)[some.at]
            exposed["inter_node"][some.ranks] = waits.across[some.at]
        return {f"{name}_s": float(s.mean()) for name, s in {**kinds, **exposed}.items()}

    @property
    def priced_by(self) -> dict[Substitute, float]:
        """The seconds that each substitute prices, in the mean over ranks: of kernels, and of communication
        that moves bytes, hidden or not, on the first rank of each program."""
        moving = (end[:, 0] - start[:, 0] for start, end in zip(self._start, self._end, strict=True))
        kernels = (
            seconds if work is None else seconds * work.mean_weights
            for seconds, work in zip(self._kernel_s, self._works, strict=True)
        )
        of_programs = zip(self._world.steps, kernels, moving, strict=True)
        return seconds_by_substitute(self._costs, of_programs, self.breakdown.get("host_s", 0.0))

    @property
    def flops(self) -> Flops:
        """The FLOPs of all ranks together."""
        total = Flops(0.0, 0.0, 0.0)
        for steps, work in zip(self._world.steps, self._works, strict=True):
            weights = None if work is None else work.mean_weights
            total = total.plus(flops_of(steps.program, weights).times(len(steps.all_ranks)))
        return total

    @property
    def breakdown(self) -> dict[str, float]:
        """The parts of a step by name, as "compute_s": the mean of :attr:`by_rank` over ranks, in seconds."""
        return {f"{name}_s": float(values.mean()) for name, values in self.by_rank.items()}

    def breakdown_of(self, rank: int) -> dict[str, float]:
        """The parts of one rank's step by name, as "compute_s", in seconds; see :attr:`by_rank`."""
        return {f"{name}_s": float(values[rank]) for name, values in self.by_rank.items()}

    def events(self, rank: int) -> Iterator[Event]:
        """The kernels, communication and waits of a rank, in program order; waits of 0 s are left out."""
        number, place = int(self._world.program_of[rank]), int(self._world.place_of[rank])
        steps, work, host = self._world.steps[number], self._works[number], self._hosts[number]
        at = None if work is None else int(work.coordinates[np.searchsorted(steps.all_ranks, rank)])
        times, _, weights = self._played(number, at, slice(place, place + 1))
        launched = None if host is None else host.of_rank(place)
        seconds = self._kernel_s[number] * weights
        return rank_events(steps.program, rank, times, seconds, weights, self._costs.launch_s, launched)

    def export(self, path: Path, ranks: Iterable[int] = (0,), **about: Any) -> Path:
        """Write the trace of some ranks to a file (compressed if its name ends in ".gz"); returns its path.
        ``about`` is the ``otherData`` of the trace: by default the step time and the number of ranks.

        Raises:
            UserError: the file cannot be written; an earlier one is unchanged.
        """
        about = about or {"step_time_s": self.step_time_s, "world_size": self.world_size}
        events = [*trace_events(self, ranks)]
        content = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        # mtime=0 leaves the time out of the file's head, so that the same trace has the same bytes
        return write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)


_PHASES, _COMPUTE = 0, 1
_MICRO = 1e6


def trace_events(timeline: Timeline, ranks: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The events of some ranks in Chrome's Trace Event Format, as dictionaries."""
    for rank in ranks:
        yield _named("process_name", rank, 0, f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _named("thread_name", rank, _PHASES, "phases")
        yield _named("thread_name", rank, _COMPUTE, "compute")
        events = list(timeline.events(rank))
        yield from _phases(rank, events)
        named: dict[int, str] = {_COMPUTE: "compute"}
        for event, row in in_rows(events):
            thread = _COMPUTE + row
            if thread not in named:
                before = [*named.values()].count(event.stream)
                named[thread] = event.stream
                words = f"{event.stream} {before + 1}" if before else event.stream
                yield _named("thread_name", rank, thread, words)
            yield _complete(event.name, event.stream, rank, thread, event.start_s, event.duration_s) | {
                "args": {"phase": event.phase, **event.details}
            }


def in_rows(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """(event, row) of a rank's events, by their start, so that no two events of a row overlap: row 0 is the
    compute stream; communication and each further stream have as many rows as their events need."""
    #: for each row but the first: its stream, and when the row is free again
    rows: list[tuple[str, float]] = []
    for event in sorted(events, key=lambda e: e.start_s):
        if event.stream == "compute":
            yield event, 0
            continue
        of_stream = (i for i, (stream, _) in enumerate(rows) if stream == event.stream)
        row = next((i for i in of_stream if rows[i][1] <= event.start_s), len(rows))
        rows[row : row + 1] = [(event.stream, event.start_s + event.duration_s)]
        yield event, row + 1


def _phases(rank: int, events: list[Event]) -> Iterator[dict[str, Any]]:
    """A slice for each phase, from its first to its last event on the compute stream without a break."""
    name, start, end = "", 0.0, 0.0
    for event in [*(e for e in events if e.stream == "compute"), None]:
        if event is None or event.phase != name:
            if name and end > start:
                yield _complete(name, "phase", rank, _PHASES, start, end - start)
            if event is not None:
                name, start = event.phase, event.start_s
        if event is not None:
            end = event.start_s + event.duration_s


def _complete(
    name: str, category: str, rank: int, thread: int, start_s: float, duration_s: float
) -> dict[str, Any]:
    what = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread}
    return what | {"ts": start_s * _MICRO, "dur": duration_s * _MICRO}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
