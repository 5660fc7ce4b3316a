"""The emulated engine: a device of this machine plays one rank of N, at full shapes.

Kernels, tensors and the allocator are real; the other ranks are not there: what they would send is made up
(:class:`EmulatedGroup`), and nobody waits. On a GPU the allocator may have as much as the cluster's card has
for tensors, so that a 16 GB card can be played on an 80 GB one, and a step that needs more is out of memory.
On CPUs, for small shapes, the meters decide that as they do on virtual ranks.

The time of a step is what this rank's kernels took (the median of the timed steps, launches included), and
what the simulation of all ranks on the cluster's links says that this rank waits: while bytes move that no
computation hides, and for other ranks. The simulation has the cluster's rates for kernels, so it hides
communication behind kernels as fast as those.
"""

from __future__ import annotations

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
from spbench.bench.measure.engines import tracing, virtual
from spbench.bench.measure.engines.distributed import DEFAULT_LIMIT_S, SEED
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.rank_memory import limit_by_host, usable_memory_bytes
from spbench.bench.measure.engines.setup import record_step, refuse_variables
from spbench.bench.measure.engines.step_times import add_step_time, add_timed_steps, can_time, utilization
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.engines.virtual import ClassTraces, mismatched
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.torchrun import check_gpus
from spbench.bench.measure.simulator.program import MEMORY_BOUND, Program
from spbench.bench.measure.trace.meter import meter_classes
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.trace.torch_internals import FakeProcessGroup, without_dispatch
from spbench.bench.measurement import Measurement
from spbench.impls import Unavailable, runs_plain

#: of torch.distributed: :class:`EmulatedGroup`
BACKEND = "emulated"
DEVICES = ("cpu", "cuda")
#: of what others send: like a matmul of weights and normalised activations, and small enough for float16
_RECEIVED_DEVIATION = 0.1
#: of matrices: that of training
_WEIGHTS_DEVIATION = 0.02
#: cluster files have the total of nvidia-smi, of which CUDA gives up to 1.2% less
_SAME_CARD = 0.98


class EmulatedGroup(dist.ProcessGroup):
    """A process group of which one rank exists, as that sees it.

    torch's fake group leaves sums as they are and, in gathered, scattered and exchanged tensors, puts this
    rank's own part in the place of each other's. It leaves alone what arrives from one other rank, and what
    an exchange of uneven parts has no counterpart for: these are drawn here from a narrow normal
    distribution, in place, after torch's operator, which meters see, as they do not see this. So no value of
    a step depends on what was in memory before, all are finite and of the size of activations, and nothing is
    allocated. On a GPU the writes take of the memory's bandwidth as those of NCCL's kernels do.
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


class _EmulatedGroupOfOld(EmulatedGroup):
    """An emulated group with the names of torch before 2.12, whose fake group writes no result of these."""

    def alltoall_base(self, output: Tensor, *rest: Any) -> dist.Work:
        work: dist.Work = super().alltoall_base(output, *rest)
        _draw([output])
        return work

    def _reduce_scatter_base(self, output: Tensor, *rest: Any) -> dist.Work:
        work: dist.Work = super()._reduce_scatter_base(output, *rest)
        _draw([output])
        return work


def _draw(tensors: Iterable[Tensor]) -> None:
    with without_dispatch():
        for x in tensors:
            if x.is_floating_point():
                x.detach().normal_(std=_RECEIVED_DEVIATION)
            else:
                x.zero_()


_is_new = hasattr(dist.ProcessGroup, "all_to_all_single")
dist.Backend.register_backend(
    BACKEND, EmulatedGroup if _is_new else _EmulatedGroupOfOld, extended_api=True, devices=[*DEVICES]
)


class EmulatedEngine(Engine):
    """Plays one rank in a process of its own: the cell's, or that with the largest peak on virtual ranks."""

    name = "emulated"
    summary = "one rank of N on a device of this machine: real kernels and memory, modelled communication"
    runs_alone = True
    ends_in_time = True
    on_devices = True
    heeds = frozenset(
        {
            "rank",
            "timing",
            "meters",
            "training.moments",
            "training.steps",
            "training.batch_on_device",
            "training.alloc_retries",
        }
    )

    def check(self, cell: Cell) -> None:
        super().check(cell)
        refuse_variables(cell)

    def measure(self, cell: Cell) -> Measurement:
        """Memory, communication and the time of a step, of one rank.

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
        refuse_variables(cell)
        with _player(cell) as play:
            yield lambda at: play(at, at.rank, timed=False)


@contextmanager
def _player(cell: Cell) -> Iterator[Callable[..., Measurement]]:
    """Inside, a function that plays a rank; all are played one after another in one new process."""
    check_gpus(1, cell.device)
    with RankPool(1) as process:

        def run(function: Callable[..., Any], *args: Any) -> Any:
            limit = cell.timeout_s or DEFAULT_LIMIT_S
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
    """:func:`played` on a process whose own group has one rank; a fake mesh takes its place.

    Args:
        memory: the part of the GPU's memory that the allocator may take.
    """
    dist.destroy_process_group()
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()  # what the probe before has left
        torch.cuda.set_per_process_memory_fraction(memory)
    try:
        return played(cell, rank, timed)
    except torch.OutOfMemoryError as error:
        full = Measurement(status="oom", reason=str(error).splitlines()[0], peak_rank=rank)
    gc.collect()  # what the error has seen
    return full


def memory_fraction(usable_bytes: int | None, total_bytes: int) -> float:
    """The part of a GPU's memory that the allocator may take to have the card that is played; None: all.

    Raises:
        Unavailable: the GPU is smaller than that card.
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
    """A metered step of that rank in this process, then timed ones; without the time of communication.

    Peaks are those of torch's caching allocator on GPUs, of the timed steps; with ``timed`` False one step is
    run there for them. Status numerics where a loss is not finite.

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
        if measurement.status == "ok" and not _finite(training.step(inputs)):
            measurement.status, measurement.reason = "numerics", "a loss is not finite"
        return measurement


def _metered(cell: Cell, mesh: DeviceMesh, events: bool = False) -> tuple[Recorder, Any, dict[str, Tensor]]:
    """Run a step under the meters; returns the recorder, and the training and inputs for further steps."""
    import torch._dynamo  # the optimizer's import of it would keep frames, and what they hold

    recorder = Recorder(mesh, events=events, further=meter_classes(cell.meters))
    generator = torch.Generator().manual_seed(SEED)
    with recorder, no_cyclic_collection():
        training, inputs = record_step(cell, mesh, recorder, generator, _draw_weights)
    return recorder, training, inputs


def _draw_weights(module: nn.Module) -> None:
    """Normal matrices, each where it is: no other rank has to have the same."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=_WEIGHTS_DEVIATION)


def _finite(outcome: Tensor | dict[str, Tensor]) -> bool:
    losses = outcome.values() if isinstance(outcome, dict) else [outcome]
    return all(math.isfinite(x.double().sum().item()) for x in losses)


def in_plain_torch(program: Program | None, device: str) -> str:
    """A line on operators that multiply matrices and ran as plain torch, so that the time is not that of the
    fused kernels that programs run, and that the simulation prices; "" on CPUs, and if none did."""
    if program is None or device == "cpu":
        return ""
    fused = program.name[(program.category == MEMORY_BOUND) & (program.flops > 0)]
    plain = [name for n in sorted({*fused.tolist()}) if runs_plain(name := program.names[n], device)]
    if not plain:
        return ""
    return f"in plain torch, not as the fused kernels that the simulation prices: {', '.join(plain)}"


def _add_time(measurement: Measurement, traces: ClassTraces, rank: int) -> None:
    """Set the step time and its breakdown, if the cluster's links are known."""
    if not traces.timed:
        return
    timeline = traces.simulator()()
    modelled = timeline.breakdown_of(rank)
    waits = {name: modelled[name] for name in ("exposed_communication_s", "bubble_s")}
    compute_s = statistics.median(measurement.step_time_samples_s)
    step_time_s = compute_s + sum(waits.values())
    add_step_time(measurement, traces.cell, step_time_s, {"compute_s": compute_s, **waits})
    measurement.mfu = utilization(traces.cell, step_time_s)
