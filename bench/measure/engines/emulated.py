"""The emulated engine: a device of this machine plays one rank of N, at full shapes.

Kernels, tensors and the allocator are real. The other ranks do not exist: the values that they would send are
made up (:class:`EmulatedGroup`), and no rank waits. On a GPU the allocator may take as many bytes as tensors
can have on the cluster's card, so an 80 GB card can play a 16 GB card, and a step that needs more is out of
memory. On CPUs, for small shapes, the meters decide whether a step fits, as on virtual ranks.

The time of a step has two parts: the time of this rank's kernels (the median of the timed steps, launches
included), and the time that this rank waits in the simulation of all ranks on the cluster's links, for bytes
that no computation hides and for other ranks. The simulation prices kernels by the cluster's rates, so
communication hides behind kernels of that speed, not of the speed measured here.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import distributed, tracing, virtual
from spbench.bench.measure.engines.class_traces import ClassTraces, mismatched
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.rank_memory import limit_by_host, usable_memory_bytes
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.step_times import add_step_time, add_timed_steps, can_time, utilization
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.torchrun import check_gpus
from spbench.bench.measure.simulator.program import Category, Program
from spbench.bench.measure.trace.meter import meter_classes
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.trace.torch_internals import FakeProcessGroup, without_dispatch
from spbench.bench.measurement import Measurement
from spbench.impls import Unavailable, runs_plain

#: the name by which torch.distributed knows :class:`EmulatedGroup`
BACKEND = "emulated"
DEVICES = ("cpu", "cuda")
#: standard deviation of received values: as of matmuls of weights with activations, and small for float16
_RECEIVED_DEVIATION = 0.1
#: standard deviation of weight matrices, as in training
_WEIGHTS_DEVIATION = 0.02
#: the least share of a card's memory in cluster files (nvidia-smi's total) that CUDA reports: up to 1.2% less
_SAME_CARD = 0.98


class EmulatedGroup(dist.ProcessGroup):
    """A process group of which only this rank exists.

    torch's fake group leaves sums as they are and, in gathered, scattered and exchanged tensors, repeats this
    rank's own part in place of the other ranks' parts. torch writes nothing into tensors received from one
    rank, or from an exchange of uneven parts. Those tensors are drawn here in place, from a narrow normal
    distribution, after torch's operator; meters see the operator but not the draw. So all values are finite,
    of the size of activations and independent of earlier memory contents, and nothing is allocated. On a GPU
    the writes take memory bandwidth as the writes of NCCL's kernels do.
    """

    def __init__(self, made: Any, options: object = None):
        super().__init__(made.group_rank, made.group_size)  # type: ignore[call-arg]  # of groups in Python
        fake = FakeProcessGroup._create_internal(made.group_rank, made.group_size)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in DEVICES:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)

    def recv(self, tensors: list[Tensor], *rest: Any) -> dist.Work:
        work = super().recv(tensors, *rest)
        _draw(tensors)
        return work

    def all_to_all_single(self, output: Tensor, sent: Tensor, *rest: Any) -> dist.Work:
        work = super().all_to_all_single(output, sent, *rest)
        if output.shape != sent.shape:
            _draw([output])
        return work


def _draw(tensors: Iterable[Tensor]) -> None:
    with without_dispatch():
        for x in tensors:
            if x.is_floating_point():
                x.detach().normal_(std=_RECEIVED_DEVIATION)
            else:
                x.zero_()


dist.Backend.register_backend(BACKEND, EmulatedGroup, extended_api=True, devices=[*DEVICES])


class EmulatedEngine(Engine):
    """Plays one rank in a new process: the cell's rank, or else the virtual rank with the largest peak."""

    name = "emulated"
    summary = "one rank of N on a device of this machine: real kernels and memory, modelled communication"
    runs_alone = True
    ends_in_time = True
    on_devices = real_tensors = True
    heeds = distributed.DistributedEngine.heeds | {"rank", "training.alloc_retries"}

    def measure(self, cell: Cell) -> Measurement:
        """The memory, communication and step time of one rank.

        Raises:
            Unsupported: the strategy cannot run these sizes; Unavailable: no GPU here, or a smaller one than
                the cluster's.
            RankError: the process failed or did not answer in time.
        """
        self.check(cell)
        plan(cell)
        traces = virtual.trace_classes(cell, events=can_time(cell))
        rank = traces.worst().rank if cell.rank is None else cell.rank
        with _player(cell) as play:
            measurement = play(cell, rank, timed=True)
        if measurement.status == "ok":
            _add_time(measurement, traces, rank)
            measurement.reason = measurement.reason or in_plain_torch(traces.worst().program, cell.device)
        return measurement

    @contextmanager
    def probes(self, cell: Cell) -> Iterator[Callable[[Cell], Measurement]]:
        self.check(cell)
        with _player(cell) as play:
            yield lambda at: play(at, at.rank, timed=False)


@contextmanager
def _player(cell: Cell) -> Iterator[Callable[..., Measurement]]:
    """Yields a function that plays a rank of a cell; all calls run one after another in one new process."""
    check_gpus(1, cell.device)
    with RankPool(1) as process:

        def run(function: Callable[..., Any], *args: Any) -> Any:
            limit = cell.timeout_s or distributed.DEFAULT_LIMIT_S
            # Gloo, as NCCL would take memory of the GPU for a group that is left at once
            (result,) = process.run({}, function, *args, timeout_s=limit, device=cell.device, backend="gloo")
            return result

        fraction = 1.0
        if cell.device == "cuda":
            fraction = memory_fraction(usable_memory_bytes(cell), run(_gpu_memory_bytes))
        yield lambda at, rank, *, timed: run(_played_alone, at, rank, timed, fraction)


def _gpu_memory_bytes(mesh: DeviceMesh) -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _played_alone(mesh: DeviceMesh, cell: Cell, rank: int, timed: bool, memory: float) -> Measurement:
    """Call :func:`played` in this process, after its one-rank process group is destroyed; status oom if a GPU
    has no room. ``memory``: the share (0 to 1) of the GPU's memory that the allocator may take.
    """
    dist.destroy_process_group()
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()  # free the blocks that the previous probe has left
        torch.cuda.set_per_process_memory_fraction(memory)
    try:
        return played(cell, rank, timed)
    except torch.OutOfMemoryError as error:
        full = Measurement(status="oom", reason=str(error).splitlines()[0], peak_rank=rank)
    gc.collect()  # free the tensors in the error's frames
    return full


def memory_fraction(usable_bytes: int | None, total_bytes: int) -> float:
    """The share (0 to 1) of this GPU's memory that the allocator may take to play the cluster's card.

    ``usable_bytes``: of the cluster's card; None: no limit. ``total_bytes``: of this GPU.

    Raises:
        Unavailable: this GPU is smaller than the cluster's card.
    """
    if usable_bytes is None:
        return 1.0
    if usable_bytes * _SAME_CARD > total_bytes:
        raise Unavailable(
            f"the cluster's card has {usable_bytes / 2**30:.1f} GiB for tensors, and this GPU "
            f"{total_bytes / 2**30:.1f} GiB",
            "name a cluster of smaller cards",
        )
    return min(1.0, usable_bytes / total_bytes)


def played(cell: Cell, rank: int, timed: bool) -> Measurement:
    """Run a metered step of a rank in this process, then timed steps, whose times have no communication.

    On GPUs the peaks are those of torch's caching allocator in the timed steps; if ``timed`` is False, one
    step is run for the peaks. The status is numerics if a loss is not finite.

    Raises:
        torch.OutOfMemoryError: a GPU has no room.
    """
    with tracing.fake_mesh(cell.mesh_sizes, rank, cell.device, BACKEND) as mesh:
        recorder, training, inputs = _metered(cell, mesh)
        trace = Trace.of(cell, rank, recorder)
        timing = cell.timing if timed else cell.timing.model_copy(update={"warmup": 0, "samples": 1})
        usable = usable_memory_bytes(cell)
        alone = trace.measurement(None if cell.device == "cuda" else usable)
        metered = mismatched(limit_by_host(alone, cell, [alone]))
        measurement = add_timed_steps(metered, rank, lambda: training.step(inputs), timing, cell.device)
        measurement.usable_memory_bytes = usable
        if not timed:
            measurement.step_time_samples_s = []
        outcome = training.step(inputs) if measurement.status == "ok" else {}
        losses = outcome.values() if isinstance(outcome, dict) else [outcome]
        if not all(math.isfinite(x.double().sum().item()) for x in losses):
            measurement.status, measurement.reason = "numerics", "a loss is not finite"
        return measurement


def _metered(cell: Cell, mesh: DeviceMesh, events: bool = False) -> tuple[Recorder, Any, dict[str, Tensor]]:
    """Run a metered step; returns (the recorder, the training or inference, the inputs of further steps)."""
    import torch._dynamo  # the optimizer's import of it would keep frames, and what they hold

    recorder = Recorder(mesh, events=events, further=meter_classes(cell.meters))
    generator = torch.Generator().manual_seed(distributed.SEED)
    with recorder, no_cyclic_collection():
        training, inputs = record_step(cell, mesh, recorder, generator, _draw_weights)
    return recorder, training, inputs


def _draw_weights(module: nn.Module) -> None:
    """Draw each weight matrix in place from a normal distribution; ranks need not have equal weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=_WEIGHTS_DEVIATION)


def in_plain_torch(program: Program | None, device: str) -> str:
    """A line that names the operators with matmuls that ran as plain torch, so that their time is not that of
    the fused kernels that the simulation prices; "" on CPUs, and if there are no such operators."""
    if program is None or device == "cpu":
        return ""
    fused = program.name[program.of(Category.MEMORY_BOUND) & (program.flops > 0)]
    plain = [name for n in sorted({*fused.tolist()}) if runs_plain(name := program.names[n], device)]
    if not plain:
        return ""
    return f"in plain torch, not as the fused kernels that the simulation prices: {', '.join(plain)}"


def _add_time(measurement: Measurement, traces: ClassTraces, rank: int) -> None:
    """Set a measurement's step time and breakdown, if the traces have the events that a simulation needs."""
    if not traces.timed:
        return
    timeline = traces.simulator()()
    modelled = timeline.breakdown_of(rank)
    waits = {name: modelled[name] for name in ("exposed_communication_s", "bubble_s")}
    compute_s = statistics.median(measurement.step_time_samples_s)
    step_time_s = compute_s + sum(waits.values())
    add_step_time(measurement, traces.cell, step_time_s, {"compute_s": compute_s, **waits})
    measurement.mfu = utilization(traces.cell, step_time_s)
