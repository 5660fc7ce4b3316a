"""What a rank does in a simulated step, event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spbench.bench.measure.simulator.program import (
    CATEGORIES,
    COLLECTIVE,
    COMPUTE_STREAM,
    KERNEL,
    MATMUL,
    PRECISION_NAMES,
    RECORD,
    SEND,
    WAIT,
    Program,
    shifted,
)
from spbench.bench.measure.simulator.waits import Times


@dataclass(frozen=True)
class Event:
    """One event of a rank, times in seconds from the start of the step.

    Attributes:
        stream: "compute" (kernels and waits), "communication" (what that stream posts), or the name of a
            further stream, see :func:`stream_names`.
        details: bytes, FLOPs and the like.
    """

    name: str
    stream: str
    phase: str
    start_s: float
    duration_s: float
    details: dict[str, Any] = field(default_factory=dict)


def stream_names(program: Program) -> list[str]:
    """A name of each stream of a program, by its number: after its collectives, or its kernels where it has
    none."""
    names = ["compute"]
    for stream in range(1, int(program.stream.max(initial=0)) + 1):
        on_it = program.stream == stream
        for kind in (COLLECTIVE, KERNEL):
            if found := [program.names[i] for i in np.unique(program.name[on_it & (program.kind == kind)])]:
                break
        names.append(f"stream {stream}: {', '.join(found)}" if found else f"stream {stream}")
    return names


def rank_events(
    program: Program,
    rank: int,
    times: Times,
    kernel_s: np.ndarray,
    weights: np.ndarray,
    launch_s: float,
    launched: Callable[[int, float], float] | None,
) -> Iterator[Event]:
    """All that a rank does, in program order; waits of no length are left out.

    Args:
        times: of this rank, [steps, 1].
        kernel_s, weights: [events]: seconds of its kernels, and how much of each event it does.
        launch_s: of the compute stream, after each of its kernels.
        launched: when each event can start at the earliest, see :meth:`HostClock.of_rank`; None: hosts take
            no time.
    """
    streams = stream_names(program)
    bounds = [first for _, first in program.marks] + [len(program)]
    phases = [""] * bounds[0]
    for (name, first), end in zip(program.marks, bounds[1:], strict=True):
        phases += [name] * (end - first)
    now, step = 0.0, 0
    for event in range(len(program)):
        launch = 0.0 if launched is None else launched(event, now)
        name, phase = program.names[program.name[event]], phases[event]
        stream = int(program.stream[event])
        if program.kind[event] == KERNEL and stream == COMPUTE_STREAM:
            if not weights[event]:
                continue
            seconds, now = float(kernel_s[event]), max(now, launch)
            yield Event(name, "compute", phase, now, seconds, _kernel(program, event))
            now += seconds + launch_s
            continue
        reached = float(times.reached[step, 0])
        if program.kind[event] == WAIT:
            if stream == COMPUTE_STREAM:
                now = float(times.left[step, 0])
                if now > reached:
                    words = f"wait for {_waited_for(program, event, streams)}"
                    yield Event(words, "compute", phase, reached, now - reached)
        elif program.kind[event] != RECORD:
            begun, ended = float(times.start[step, 0]), float(times.end[step, 0])
            if program.kind[event] == KERNEL:
                details = _kernel(program, event)
            else:
                details = {"bytes": int(program.nbytes[event]), "posted_s": reached}
                details |= _parties(program, event, rank)
            beside = "communication" if stream == COMPUTE_STREAM else streams[stream]
            yield Event(name, beside, phase, begun, ended - begun, details)
        step += 1


def _kernel(program: Program, event: int) -> dict[str, Any]:
    """Bytes, FLOPs and the like of a kernel."""
    details: dict[str, Any] = {
        "bytes": int(program.nbytes[event]),
        "flops": int(program.flops[event]),
        "class": CATEGORIES[program.category[event]],
        "dtype": PRECISION_NAMES[program.precision[event]],
    }
    if program.category[event] == MATMUL:
        details["batch, m, n, k"] = program.shape[event].tolist()
    return details


def _waited_for(program: Program, wait: int, streams: list[str]) -> str:
    """What a wait is for: communication by its name, or a stream."""
    event = int(program.partner[wait])
    if program.kind[event] == RECORD:
        return streams[program.stream[event]]
    return program.names[program.name[event]]


def _parties(program: Program, event: int, rank: int) -> dict[str, Any]:
    """Global ranks of a transfer or a collective."""
    partner = int(program.partner[event])
    if program.kind[event] == COLLECTIVE:
        return {"ranks": list(program.groups[partner].members(rank, program.mesh))}
    peer = shifted(rank, program.peers[partner], program.mesh)
    ends = (rank, peer) if program.kind[event] == SEND else (peer, rank)
    return {"source": ends[0], "destination": ends[1]}
