"""What a simulation found: the step time, what it is made of, and every event of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from spbench.bench.simulator.program import (
    CATEGORIES,
    COLLECTIVE,
    KERNEL,
    PRECISION_NAMES,
    SEND,
    WAIT,
    shifted,
)

if TYPE_CHECKING:
    from spbench.bench.simulator.costs import Costs
    from spbench.bench.simulator.message_matching import World


#: times of one kind that a breakdown copies at a time
_AT_A_TIME = 2**19


@dataclass(frozen=True)
class Event:
    """One event of a rank, times in seconds from the start of the step.

    Attributes:
        stream: "compute" (kernels and waits) or "communication".
        details: bytes, FLOPs and the like.
    """

    name: str
    stream: str
    phase: str
    start_s: float
    duration_s: float
    details: dict[str, Any] = field(default_factory=dict)


def in_rows(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """The events of a rank by their start, each with a row in which no two overlap: 0 is that of the
    compute stream, 1 and on are those of communication, as many as transfers overlap."""
    #: when each communication row is free again
    free: list[float] = []
    for event in sorted(events, key=lambda e: e.start_s):
        if event.stream == "compute":
            yield event, 0
            continue
        row = next((i for i, since in enumerate(free) if since <= event.start_s), len(free))
        free[row : row + 1] = [event.start_s + event.duration_s]
        yield event, row + 1


class Timeline:
    """A simulated step.

    Attributes:
        step_time_s: until the last rank's computing and communication have ended, with the step's overhead.
    """

    def __init__(
        self,
        world: World,
        costs: Costs,
        kernel_s: list[np.ndarray],
        computed: list[np.ndarray],
        reached: list[np.ndarray],
        left: list[np.ndarray],
        start: list[np.ndarray],
        end: list[np.ndarray],
    ):
        self._world, self._costs, self._kernel_s = world, costs, kernel_s
        self._reached, self._left, self._start, self._end = reached, left, start, end
        self._computed = computed
        last = [float(c.max()) for c in computed]
        last += [float(np.nanmax(e)) for e in end if e.size and not np.isnan(e).all()]
        self.step_time_s = max(last) + costs.step_overhead_s

    @property
    def world_size(self) -> int:
        return self._world.size

    @cached_property
    def by_rank(self) -> dict[str, np.ndarray]:
        """What each rank's step is made of, in seconds, by global rank.

        compute: kernels by the roofline, each at least the cluster's floor. overhead: launches and the step's
        own. exposed_communication: waiting while the bytes move. bubble: waiting for other ranks to take
        part, or to end. These four add up to the step time. hidden_communication: bytes move while the rank
        computes.
        """
        parts = {
            name: np.zeros(self._world.size)
            for name in ("compute", "exposed_communication", "bubble", "overhead", "hidden_communication")
        }
        step_overhead = self._costs.step_overhead_s
        for number, steps in enumerate(self._world.steps):
            kernels = int((steps.program.kind == KERNEL).sum())
            parts["compute"][steps.ranks] = self._kernel_s[number].sum()
            parts["overhead"][steps.ranks] = kernels * self._costs.launch_s + step_overhead
            # some ranks at a time, for times are large arrays and are copied here
            width = max(1, _AT_A_TIME // max(1, len(steps)))
            for first in range(0, len(steps.ranks), width):
                places = slice(first, first + width)
                ranks = steps.ranks[places]
                waited, exposed, busy = self._communication(number, places)
                parts["exposed_communication"][ranks] = exposed
                tail = self.step_time_s - step_overhead - self._computed[number][places]
                parts["bubble"][ranks] = waited - exposed + tail
                parts["hidden_communication"][ranks] = np.maximum(busy - exposed, 0.0)
        return {name: values[self._world.stands_for] for name, values in parts.items()}

    def _communication(self, number: int, places: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For some ranks of a program, seconds: of waits, of waits while the bytes move, and in which they
        communicate, whatever number of transfers at once."""
        steps = self._world.steps[number]
        kinds, partners = np.array(steps.kinds, dtype=np.int64), np.array(steps.partners, dtype=np.int64)
        waits, posts = np.flatnonzero(kinds == WAIT), np.flatnonzero(kinds != WAIT)
        start, end = self._start[number][:, places], self._end[number][:, places]
        reached = self._reached[number][:, places][waits]
        waited = self._left[number][:, places][waits] - reached
        moving = end[partners[waits]] - np.maximum(start[partners[waits]], reached)
        exposed = np.clip(moving, 0.0, waited)
        if self._costs.overlap_loss:  # after the end of what is waited for, or instead of it
            exposed = np.maximum(exposed, reached + waited - np.maximum(reached, end[partners[waits]]))
        return _sum(waited), _sum(exposed), _covered(start[posts], end[posts])

    @property
    def breakdown(self) -> dict[str, float]:
        """Mean over ranks of :attr:`by_rank`, in seconds."""
        return {f"{name}_s": float(values.mean()) for name, values in self.by_rank.items()}

    def breakdown_of(self, rank: int) -> dict[str, float]:
        """What one rank's step is made of, in seconds; see :attr:`by_rank`."""
        return {f"{name}_s": float(values[rank]) for name, values in self.by_rank.items()}

    @property
    def serial_s(self) -> float:
        """Seconds if nothing ran beside anything else anywhere: no step can take longer."""
        total = self._costs.step_overhead_s
        for number, steps in enumerate(self._world.steps):
            program = steps.program
            kernels = int((program.kind == KERNEL).sum())
            ranks = len(steps.all_ranks)
            total += ranks * (float(self._kernel_s[number].sum()) + kernels * self._costs.launch_s)
            # each simulated rank stands for as many
            seconds = (self._end[number] - self._start[number]).sum(1) * (ranks / len(steps.ranks))
            for step, kind in enumerate(steps.kinds):
                if kind == SEND:  # its receive is the same transfer
                    total += float(seconds[step])
                elif kind == COLLECTIVE:
                    total += float(seconds[step]) / len(program.groups[steps.partners[step]].places)
        return total

    def events(self, rank: int) -> Iterator[Event]:
        """All that a rank does, in program order; waits of no length are left out."""
        number, place = int(self._world.program_of[rank]), int(self._world.place_of[rank])
        steps = self._world.steps[number]
        program, kernel_s = steps.program, self._kernel_s[number]
        bounds = [first for _, first in program.marks] + [len(program)]
        phases = [""] * bounds[0]
        for (name, first), end in zip(program.marks, bounds[1:], strict=True):
            phases += [name] * (end - first)
        now, step = 0.0, 0
        for event in range(len(program)):
            name, phase = program.names[program.name[event]], phases[event]
            if program.kind[event] == KERNEL:
                seconds = float(kernel_s[event])
                details: dict[str, Any] = {
                    "bytes": int(program.nbytes[event]),
                    "flops": int(program.flops[event]),
                    "class": CATEGORIES[program.category[event]],
                    "dtype": PRECISION_NAMES[program.precision[event]],
                }
                if program.shape[event].any():
                    details["batch, m, n, k"] = program.shape[event].tolist()
                yield Event(name, "compute", phase, now, seconds, details)
                now += seconds + self._costs.launch_s
                continue
            reached = now = float(self._reached[number][step, place])
            if program.kind[event] == WAIT:
                now = float(self._left[number][step, place])
                if now > reached:
                    waited_for = program.names[program.name[program.partner[event]]]
                    yield Event(f"wait for {waited_for}", "compute", phase, reached, now - reached)
            else:
                begun, ended = float(self._start[number][step, place]), float(self._end[number][step, place])
                details = {"bytes": int(program.nbytes[event]), "posted_s": reached}
                details |= self._parties(number, event, rank)
                yield Event(name, "communication", phase, begun, ended - begun, details)
            step += 1

    def _parties(self, number: int, event: int, rank: int) -> dict[str, Any]:
        """Global ranks of a transfer or a collective."""
        program = self._world.steps[number].program
        partner = int(program.partner[event])
        if program.kind[event] == COLLECTIVE:
            return {"ranks": list(program.groups[partner].members(rank, program.mesh))}
        peer = shifted(rank, program.peers[partner], program.mesh)
        ends = (rank, peer) if program.kind[event] == SEND else (peer, rank)
        return {"source": ends[0], "destination": ends[1]}


def _covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of each column of [events, ranks], the length of the union of its intervals."""
    # nearly in order already, which a stable sort makes use of
    order = np.argsort(start, axis=0, kind="stable")
    start, end = np.take_along_axis(start, order, 0), np.take_along_axis(end, order, 0)
    earlier = np.zeros_like(end)
    np.maximum.accumulate(end[:-1], axis=0, out=earlier[1:])
    return _sum(np.maximum(end - np.maximum(start, earlier), 0.0))


def _sum(values: np.ndarray) -> np.ndarray:
    """Sums of the columns of [steps, ranks], from the first row to the last. numpy's own sum adds in another
    order where there is one column, so that a rank's sum would depend on how many are simulated."""
    if not len(values):
        return np.zeros(values.shape[1])
    sums: np.ndarray = np.cumsum(values, axis=0)[-1]
    return sums
