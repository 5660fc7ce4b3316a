"""A cluster whose rates are measured on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench import measure
from spbench.bench.cell import Cell, Sizes
from spbench.bench.tools.calibrate.collective_rates import (
    SEND,
    SEND_BETWEEN,
    SEND_WITHIN,
    collective_rates,
    ranks_per_node,
)
from spbench.bench.tools.calibrate.compute_rates import SMALL, RatePoint, RateSweep, compute_rates
from spbench.bench.tools.calibrate.operator_times import (
    INSIDE_STEPS,
    host_figures,
    matmul_fit,
    operator_points,
    operator_times,
)
from spbench.bench.tools.calibrate.rate_fits import LeastSquares, least_squares

#: the digits to which a measured rate is rounded
_DIGITS = 4


@dataclass(frozen=True)
class Machine:
    """The measurements of a machine, and facts about the machine.

    Attributes:
        points: the points of all operations, in the order of measurement.
        device_type: "cpu" or "cuda"; ``device_name`` is the system's name of the device.
        memory_bytes: a GPU's memory, and the part that its context takes; None for a CPU.
        per_node: the number of ranks on each host.
        kernels: the number of kernels of the small training step.
        host_work: for each training step whose operators were timed, the numbers of its operators, views,
            nodes of autograd and calls of modules.
    """

    points: Sequence[RatePoint]
    device_type: str
    device_name: str
    memory_bytes: tuple[int, int] | None
    ranks: int
    per_node: int
    kernels: int
    host_work: Sequence[Sequence[int]] = ()

    def of(self, operation: str, precision: str | None = None) -> list[RatePoint]:
        """The points of an operation, in one ``precision`` or in all, sorted by size."""
        points = [p for p in self.points if p.operation == operation and precision in (None, p.precision)]
        return sorted(points, key=lambda point: point.extent)


def measure_machine(world: int, sweep: RateSweep, device: str = "cpu") -> Machine:
    """Measure this machine on ``world`` real ranks at once; a single rank measures no collectives. Raises the
    errors of :func:`launch`."""
    cell = SMALL.model_copy(
        update={"sizes": Sizes(sp=world), "engine": "distributed", "device": device, "precision": "fp32"}
    )
    measured = measure.launch(cell, partial(_on_rank, sweep=sweep))[0]
    kernels, *_ = _counts(SMALL)
    counts = [_counts(step) for step in sweep.steps]
    return Machine(**measured, ranks=world, kernels=kernels, host_work=counts)


def _counts(cell: Cell) -> list[int]:
    """A step's numbers of operators that launch kernels, of views, nodes of autograd, and module calls."""
    program = measure.trace_rank(cell, events=True).program
    assert program is not None
    views, nodes, modules, *_ = program.host.sum(0).tolist()
    return [int((program.kind == measure.Kind.KERNEL).sum()), views, nodes, modules]


def _on_rank(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> dict[str, Any]:
    points = compute_rates(mesh, cell, sweep)
    points += operator_points(mesh, cell, sweep)
    points += collective_rates(mesh.device_type, sweep)
    memory, threads = None, torch.get_num_threads()
    name = f"{measure.cpu_model()}, {threads} thread{'s' * (threads > 1)}"
    if mesh.device_type == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = total, max(0, total - free - torch.cuda.memory_reserved())
        name = torch.cuda.get_device_name()
    group = dist.group.WORLD
    assert group is not None
    return {
        "points": points,
        "device_type": mesh.device_type,
        "device_name": name,
        "memory_bytes": memory,
        "per_node": ranks_per_node(group),
    }


def cluster_of(machine: Machine, name: str, source: str) -> measure.Cluster:
    """The cluster with the measured rates of a machine; ``source`` is the source of every rate and limit.

    The peak of matmuls is the best rate of all shapes; the bandwidth of memory is the rate of the largest
    tensors. A link's latency is the time of the smallest message; its bandwidth is the largest message's
    bytes over the difference of both times. Matmuls and operators inside timed training steps have rates of
    their own, and so have collectives if all ranks were on one machine. Ranks on one machine's CPUs count as
    nodes, with the loopback between them, as in the cluster ``local``."""
    devices_per_node, node_link, network = _links(machine, source)
    return measure.Cluster(
        name=name,
        about=f"{machine.device_name}; {source}",
        device=_device(machine, source),
        devices_per_node=devices_per_node,
        node_link=node_link,
        network=network,
        host=_host(machine, source) if machine.host_work else None,
        collective_model="measured" if (node_link or network).collectives else "ring",
        # rates of operators inside steps are part of the device and of the host
        measured=[_measured(p) for p in machine.points if not p.operation.startswith(INSIDE_STEPS)],
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _sourced(value: float | None, source: str, note: str) -> Any:
    return measure.Sourced(value=None if value is None else _rounded(value), source=source, note=note)


def _links(machine: Machine, source: str) -> tuple[int, measure.Link | None, measure.Network]:
    """The number of a node's devices, the link between these devices, and the network between nodes."""
    if machine.per_node < machine.ranks:
        # all ranks of a node send at once, so that the measured rate is that of a card for each rank
        network = measure.Network(**_link(machine, SEND_BETWEEN, source), nics_per_node=machine.per_node)
        within = measure.Link(**_link(machine, SEND_WITHIN, source)) if machine.per_node > 1 else None
        return machine.per_node, within, network
    unknown: Any = measure.Sourced(value=None, source="not measured: there was one node")
    network = measure.Network(latency_s=unknown, bandwidth_bytes_per_s=unknown)
    if machine.ranks == 1:
        return 1, None, network
    rates = {**_link(machine, SEND, source), "collectives": _rated(machine, source)}
    if machine.device_type == "cuda":
        return machine.ranks, measure.Link(**rates), network
    return 1, None, measure.Network(**rates)


def _rated(machine: Machine, source: str) -> dict[Any, list[measure.BusRate]]:
    """The latency and the bus bandwidth of each collective that was measured at several sizes."""
    rates = {}
    for kind in get_args(measure.RatedCollective):
        points = machine.of(kind)
        if len(points) < 2:
            continue
        sent = [point.nbytes * point.bus_factor for point in points]
        fit = least_squares([point.seconds for point in points], [1.0] * len(points), sent)
        latency, byte_s = fit.coefficients
        if byte_s:
            note = f"{kind} on {machine.ranks} ranks, {points[0].size} to {points[-1].size}; {_off(fit)}"
            figures = (_sourced(value, source, note) for value in (latency, 1 / byte_s))
            of_kind = dict(zip(("latency_s", "bandwidth_bytes_per_s"), figures, strict=True))
            rates[kind] = [measure.BusRate(ranks=machine.ranks, **of_kind)]
    return rates


def _off(fit: LeastSquares) -> str:
    return f"off by {fit.mean_error:.0%} in the mean, {fit.largest_error:.0%} at most"


def _link(machine: Machine, operation: str, source: str) -> dict[str, Any]:
    small, large = machine.of(operation)[0], machine.of(operation)[-1]
    # if noise makes the large message faster, or there is only one message, no latency is subtracted
    moving_s = large.seconds - small.seconds
    bandwidth = large.nbytes / (moving_s if moving_s > 0 else large.seconds)
    what = f"{large.operation} on {large.ranks} ranks"
    return {
        "latency_s": _sourced(small.seconds, source, f"{what}, {small.size}"),
        "bandwidth_bytes_per_s": _sourced(bandwidth, source, f"{what}, {large.size} less latency"),
    }


def _device(machine: Machine, source: str) -> measure.Device:
    if machine.memory_bytes is None:
        total = measure.Sourced[int](value=None, source="not limited")
        context = measure.Sourced[int](value=0, source="there is no device context")
    else:
        total = measure.Sourced[int](value=machine.memory_bytes[0], source=source)
        note = "of the whole card, less free and what torch's allocator held; with other processes' share"
        context = measure.Sourced[int](value=machine.memory_bytes[1], source=source, note=note)
    largest = machine.of("sum")[-1]
    sums = f"sum of two tensors of {largest.size} each into new memory"
    precisions = dict.fromkeys(p.precision for p in machine.of("matmul"))
    peaks = {precision: _matmuls(machine, precision, source) for precision in precisions}
    launches: Any = measure.Sourced(value=None, source="host has it")
    if not machine.host_work:
        (step,) = machine.of("training step")
        note = f"step of {step.size} over its {machine.kernels} operators"
        launches = _sourced(step.seconds / machine.kernels, source, note)
    return measure.Device(
        name=machine.device_name,
        memory_total_bytes=total,
        memory_context_bytes=context,
        memory_bandwidth_bytes_per_s=_sourced(largest.bytes_per_s, source, sums),
        peak_flops_per_s=peaks,  # type: ignore[arg-type]
        matmul=_in_steps(machine, peaks, source),  # type: ignore[arg-type]
        operators={
            name: measure.Sourced(value=[[float(round(n)), _rounded(s)] for n, s in times], source=source)
            for name, times in operator_times(machine.points).items()
        },
        launch_overhead_s=launches,
    )


def _host(machine: Machine, source: str) -> measure.Host:
    """The host's seconds in training steps outside of operators, on a CPU, which also runs the operators."""
    note = "by calls of each alone; step_s is what is left of training steps"
    seconds = host_figures(machine.points, machine.host_work)
    figures = {name: _sourced(value, source, note) for name, value in seconds.items()}
    none = _sourced(0.0, source, "in what operators and collectives take")
    ahead: Any = measure.Sourced(value=1, source=source, note="kernels run where they are launched")
    return measure.Host(
        **figures, collective_s=none, launch_latency_s=none, launches_ahead=ahead, synchronous=True
    )


def _in_steps(
    machine: Machine, peaks: Mapping[str, Any], source: str
) -> dict[str, measure.MatmulRate] | None:
    """The rates of matmuls inside training steps, by precision; None if no such matmuls were timed."""
    rates = {}
    for precision, peak in peaks.items():
        fit = matmul_fit(machine.points, precision)
        if fit is not None and fit.coefficients[0]:
            flop_s, byte_s = fit.coefficients
            note = f"matmuls inside training steps; {_off(fit)}"
            rates[precision] = measure.MatmulRate(
                share=_sourced(min(1 / (flop_s * peak.value), 1.0), source, note),
                bandwidth_bytes_per_s=_sourced(1 / byte_s if byte_s else None, source, note),
            )
    return rates or None


def _matmuls(machine: Machine, precision: str, source: str) -> Any:
    matmuls = machine.of("matmul", precision)
    best = max(matmuls, key=lambda point: point.flops_per_s or 0.0)
    note = f"{best.size}, the best of {len(matmuls)} shapes"
    for operation in ("attention forward", "attention forward and backward"):
        if points := machine.of(operation, precision):
            rate = max(point.flops_per_s or 0.0 for point in points)
            note += f"; {operation}: {rate:.3g} at most"
    return _sourced(best.flops_per_s, source, note)


def _measured(point: RatePoint) -> measure.MeasuredRate:
    values: dict[str, Any] = {name: getattr(point, name) for name in measure.MeasuredRate.model_fields}
    values |= {name: _rounded(value) for name, value in values.items() if isinstance(value, float)}
    return measure.MeasuredRate(**values)
