"""Step programs made by hand, and clusters with round figures, to know a simulation's answer beforehand."""

from collections.abc import Sequence
from typing import Any

from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.simulator.program import Group, Kind, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.simulator.timeline import Timeline


def simulate(
    programs: Sequence[Program],
    ranks_of: Sequence[Sequence[int]],
    on: Cluster,
    precision: str = "fp32",
    calibration: Calibration | None = None,
) -> Timeline:
    """Time one step; see :class:`Simulator`."""
    return Simulator(programs, ranks_of, on, precision)(calibration)


def cluster(
    *,
    rate: float = 1.0,
    memory: float = 1e30,
    bandwidth: float = 1.0,
    latency: float = 0.0,
    launch: float = 0.0,
    devices: int = 1,
    nics: int = 1,
    node_bandwidth: float = 1.0,
    node_latency: float = 0.0,
) -> Cluster:
    """A cluster whose FLOP, and byte on a link, cost a second each unless said otherwise."""

    def figure(value: float) -> dict[str, Any]:
        return {"value": value, "source": "made up"}

    return Cluster.model_validate(
        {
            "name": "made-up",
            "about": "round figures",
            "device": {
                "name": "none",
                "memory_total_bytes": {"value": None, "source": "made up"},
                "memory_context_bytes": {"value": 0, "source": "made up"},
                "memory_bandwidth_bytes_per_s": figure(memory),
                "peak_flops_per_s": {"fp32": figure(rate)},
                "launch_overhead_s": figure(launch),
            },
            "devices_per_node": devices,
            "node_link": {"latency_s": figure(node_latency), "bandwidth_bytes_per_s": figure(node_bandwidth)},
            "network": {
                "latency_s": figure(latency),
                "bandwidth_bytes_per_s": figure(bandwidth),
                "nics_per_node": nics,
            },
        }
    )


#: its links cost next to nothing
INFINITE = cluster(bandwidth=1e300, node_bandwidth=1e300)


def timed(
    programs: Sequence[Program],
    ranks_of: Sequence[Sequence[int]],
    on: Cluster | None = None,
    **scalars: float,
) -> Timeline:
    return simulate(programs, ranks_of, on or cluster(), calibration=Calibration(**scalars))


def everyone(size: int) -> Group:
    """The group of all ranks of a mesh that has only sp."""
    return Group((3,), tuple((i,) for i in range(size)))


def ring(size: int, compute: float, nbytes: float, *, overlap: bool) -> Program:
    """Chunks travel all the way round and each rank computes on each, with ``overlap`` while they move."""
    b = ProgramBuilder((1, 1, 1, size))
    b.phase("forward")
    for step in range(size):
        if step == size - 1:
            b.kernel("mm", flops=compute)
            break
        if not overlap:
            b.kernel("mm", flops=compute)
        works = [b.send(nbytes, (0, 0, 0, 1)), b.recv(nbytes, (0, 0, 0, -1))]
        if overlap:
            b.kernel("mm", flops=compute)
        for work in works:
            b.wait(work)
    return b.program()


def chain(size: int, compute: float, nbytes: float) -> tuple[list[Program], list[list[int]]]:
    """Each rank waits for the rank before it, computes, and sends on: three programs, most ranks run one."""
    programs = []
    for first, last in ((True, False), (False, False), (False, True)):
        b = ProgramBuilder((1, 1, 1, size))
        b.phase("forward")
        if not first:
            b.wait(b.recv(nbytes, (0, 0, 0, -1)))
        b.kernel("scan", flops=compute)
        if not last:
            b.wait(b.send(nbytes, (0, 0, 0, 1)))
        programs.append(b.program())
    return programs, [[0], list(range(1, size - 1)), [size - 1]]


def one_f_one_b(
    stages: int, micro_batches: int, forward: float, backward: float, nbytes: float = 0.0, width: int = 1
) -> tuple[list[Program], list[list[int]]]:
    """1F1B (PipeDream-flush) of equal stages, each run by ``width`` ranks (sp)."""
    programs, ranks = [], []
    for stage in range(stages):
        b = ProgramBuilder((1, stages, 1, width))
        posted: list[int] = []

        def step_forward(b: ProgramBuilder = b, stage: int = stage, posted: list[int] = posted) -> None:
            b.phase("forward")
            if stage > 0:
                b.wait(b.recv(nbytes, (0, -1, 0, 0)))
            b.kernel("forward", flops=forward)
            if stage < stages - 1:
                posted.append(b.send(nbytes, (0, 1, 0, 0)))

        def step_backward(b: ProgramBuilder = b, stage: int = stage, posted: list[int] = posted) -> None:
            b.phase("backward")
            if stage < stages - 1:
                b.wait(b.recv(nbytes, (0, 1, 0, 0)))
            b.kernel("backward", flops=backward)
            if stage > 0:
                posted.append(b.send(nbytes, (0, -1, 0, 0)))

        warmup = min(stages - stage - 1, micro_batches)
        for _ in range(warmup):
            step_forward()
        for _ in range(micro_batches - warmup):
            step_forward()
            step_backward()
        for _ in range(warmup):
            step_backward()
        for work in posted:
            b.wait(work)
        programs.append(b.program())
        ranks.append([stage * width + i for i in range(width)])
    return programs, ranks


def of_links(on: Cluster, ranks: int, *, sends: bool = False) -> dict[tuple[str, str, str], float]:
    """What an all-to-all over so many ranks, or a send of each to the next, is priced by."""
    b = ProgramBuilder((1, 1, 1, ranks))
    if sends:
        posted = [b.send(8.0, (0, 0, 0, 1)), b.recv(8.0, (0, 0, 0, -1))]
    else:
        posted = [b.collective("all_to_all", 8.0, everyone(ranks))]
    for each in posted:
        b.wait(each)
    timeline = simulate([b.program()], [range(ranks)], on)
    return {tuple(each): seconds for each, seconds in timeline.priced_by.items()}


def serial_s(timeline: Timeline) -> float:
    """The seconds if no two events of any ranks ran at the same time: an upper bound of the step time."""
    costs, total = timeline._costs, timeline._costs.step_overhead_s
    for number, steps in enumerate(timeline._world.steps):
        program, ranks = steps.program, len(steps.all_ranks)
        kernels = int((program.kind == Kind.KERNEL).sum())
        total += ranks * (float(timeline._kernel_s[number].sum()) + kernels * costs.launch_s)
        if (host := timeline._hosts[number]) is not None:
            total += ranks * (host._begun + float(host.work.sum()) + len(host.work) * host.latency)
        # each simulated rank has the times of ranks / len(steps.ranks) ranks
        seconds = (timeline._end[number] - timeline._start[number]).sum(1) * (ranks / len(steps.ranks))
        for step, kind in enumerate(steps.kinds):
            if kind == Kind.SEND:  # its receive is the same transfer
                total += float(seconds[step])
            elif kind == Kind.COLLECTIVE:
                total += float(seconds[step]) / len(program.groups[steps.partners[step]].places)
    return total
