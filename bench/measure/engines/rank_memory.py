"""The memory of a rank. On its card: the peaks by the allocator, the request that has no room, and settings
that need less. On its host: the peaks, and whether a node has enough. The tensors of a card can have the
bytes that CUDA leaves, less the buffers by which NCCL connects ranks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Self

import numpy as np

from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.plan import Plan, RankClass, backend_options, plan
from spbench.bench.measure.memory.allocator import MIB, CachingAllocator, OutOfMemory, replay, without_retries
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments, unsplit_from
from spbench.bench.measure.simulator.costs import node_of
from spbench.bench.measure.trace.memory import PAGEABLE
from spbench.bench.measure.trace.memory_log import MemoryLog, Peak
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import EXPANDABLE_SEGMENTS, max_split_size_mb
from spbench.bench.units import GIB
from spbench.impls import Place, all_backends


def host_peaks(log: MemoryLog) -> list[int]:
    """The most bytes of the host's memory that a rank has held, up to the end of set-up and of each step.

    PyTorch's allocator of pinned memory rounds each request up to a power of two, keeps freed blocks, and
    gives a block out again only for requests of its own size (allocate and get_free_block of
    ATen/core/CachingHostAllocator.h). So it holds as many blocks of each size as were ever alive at once. In
    pageable memory only live storages count.
    """
    alive: Counter[int] = Counter()
    most: Counter[int] = Counter()
    pinned = pageable = peak = 0
    taken = []
    for start, end in pairwise([0, log.step_start, *log.step_ends]):
        for event in log.events[start:end]:
            number, change = abs(event) - 1, 1 if event > 0 else -1
            if log.tags.get(number) == PAGEABLE:
                pageable += change * log.sizes[number]
            else:
                size = 1 << (log.sizes[number] - 1).bit_length() if log.sizes[number] else 0
                alive[size] += change
                if alive[size] > most[size]:
                    most[size] = alive[size]
                    pinned += size
            peak = max(peak, pinned + pageable)
        taken.append(peak)
    return taken


def limit_by_host(
    measurement: Measurement, cell: Cell, by_rank: Sequence[Measurement], planned: Plan | None = None
) -> Measurement:
    """Set in a measurement the most bytes that a rank holds in its host's memory, and the ranks of a node
    together; turn its status from ok into oom if a node has less host memory.

    Args:
        by_rank: the measurements of at least one rank of each class.
        planned: the cell's plan; None: this function makes the plan.
    """
    peaks = [m.peak_host_memory_bytes or 0 for m in by_rank]
    if not any(peaks):
        return measurement
    planned, held = planned or plan(cell), np.zeros(cell.sizes.world, dtype=np.int64)
    for measured, peak in zip(by_rank, peaks, strict=True):
        held[list(planned.class_of(measured.peak_rank).ranks)] = peak
    for measured, peak in zip(by_rank, peaks, strict=True):  # a rank's own peak replaces its class's peak
        held[measured.peak_rank] = peak
    cluster = load_cluster(cell.cluster)
    nodes = node_of(np.arange(len(held)), cluster)
    sums = np.bincount(nodes, weights=held).astype(np.int64)
    node = int(sums.argmax())
    measurement.peak_host_memory_bytes, measurement.node_host_memory_bytes = int(held.max()), int(sums[node])
    total = cluster.host_memory.total_bytes.value
    if measurement.status == "ok" and total is not None and measurement.node_host_memory_bytes > total:
        ranks, fullest = int((nodes == node).sum()), int(held[nodes == node].max())
        measurement.status = "oom"
        measurement.reason = (
            f"the host of a node has {total / GIB:.1f} GiB of memory, and its {ranks} ranks hold "
            f"{sums[node] / GIB:.1f} GiB there, up to {fullest / GIB:.2f} GiB each: what waits on the "
            "host does not fit, though the devices have room"
        )
    return measurement


def part_of_host(cell: Cell, nbytes: int) -> float:
    """The share (0 to 1, or more if it does not fit) of a node's host memory that its ranks take if each rank
    holds ``nbytes`` there; 0 if the cluster's file does not give the host memory."""
    cluster = load_cluster(cell.cluster)
    ranks = int(np.bincount(node_of(np.arange(cell.sizes.world), cluster)).max())
    total = cluster.host_memory.total_bytes.value
    return nbytes * ranks / total if total else 0.0


def allocator_of(cell: Cell) -> type[CachingAllocator]:
    """The class of allocator for a cell's ``training.cuda_alloc_conf`` and ``training.alloc_retries``."""
    kind: type[CachingAllocator] = CachingAllocator
    conf = cell.training.cuda_alloc_conf
    if conf is not None:
        kind = ExpandableSegments if conf == EXPANDABLE_SEGMENTS else unsplit_from(max_split_size_mb(conf))
    return kind if cell.training.alloc_retries else without_retries(kind)


@dataclass(frozen=True)
class Failure:
    """The point at which a rank runs out of memory.

    Attributes:
        step: the number of the step, from 1; 0 for set-up.
        phase: the phase of the step, or SET_UP.
        error: the request that has no room.
        steps_fit: whether only set-up does not fit, but the steps do.
    """

    step: int
    phase: str
    error: OutOfMemory
    steps_fit: bool = False

    def reason(self, ranks: RankClass) -> str:
        """The failure in one line, for a result row.

        Args:
            ranks: the class of the rank that runs out of memory.
        """
        error, alike = self.error, len(ranks.ranks)
        where = f"{self.phase} of step {self.step}" if self.step else self.phase
        who = f"rank {ranks.first}" + (f", one of {alike} alike" if alike > 1 else "")
        stage = f" (stage {ranks.stage.index})" if ranks.stage.count > 1 else ""
        where += "" if error.retried else " without a retry of the allocator"
        return (
            f"no room for {error.requested / MIB:.0f} MiB with {error.allocated / MIB:.0f} MiB allocated "
            f"and {error.reserved / MIB:.0f} MiB reserved, in {where} on {who}{stage}"
        )


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory in set-up and in each traced step. For a rank that runs out of memory, the peaks are
    those on a card without a limit.

    Attributes:
        setup: the peak of set-up.
        peaks: the peak of each step.
        reserved: the most bytes reserved up to the end of set-up, and up to the end of each step.
        phase_ends: for set-up and each step, by the name of a phase, the bytes ``allocated`` and
            ``reserved`` at the end of the last phase of that name.
        reserved_on_card: the most bytes reserved on the real card, until the last step or the failure.
        failure: the point at which the rank runs out of memory; None if it does not.
        returned: for set-up and each step, (bytes that the allocator returns to the full card, the driver's
            seconds to return and replace them); empty: none.
    """

    setup: Peak
    peaks: Sequence[Peak]
    reserved: Sequence[int]
    phase_ends: Sequence[Mapping[str, Mapping[str, int]]]
    reserved_on_card: int
    failure: Failure | None
    returned: Sequence[tuple[int, float]] = ()

    @classmethod
    def of(
        cls, log: MemoryLog, capacity: int | None, kind: type[CachingAllocator] = CachingAllocator
    ) -> Self:
        """The memory of a rank, from a replay of its memory log through an allocator.

        Args:
            capacity: bytes of the card that tensors can have; None: no limit.
            kind: the class of the allocator.
        """
        ends = log.phase_ends()
        stops = sorted({log.step_start, *log.step_ends, *(at for of_step in ends for at in of_step.values())})
        found = card = replay(log.sizes, log.events, capacity, stops, log.streams, kind)
        failure = None
        if card.out_of_memory is not None:
            at, step = card.events, log.step_of(card.events)
            fit = False
            if not step:  # the steps after a set-up whose own tensors are left out
                dead = {-event for event in log.events[: log.step_start]}
                left = [event for event in log.events[: log.step_start] if event > 0 and event not in dead]
                left += log.events[log.step_start :]
                steps = replay(log.sizes, left, capacity, (), log.streams, kind)
                fit = steps.out_of_memory is None
            failure = Failure(step, log.phase_of(at), card.out_of_memory, fit)
            found = replay(log.sizes, log.events, None, stops, log.streams, kind)
        live, setup, peaks = log.levels(found.blocks)
        reserved = dict(zip(stops, found.reserved, strict=True))
        phase_ends: list[Mapping[str, Mapping[str, int]]] = [
            {name: {"allocated": int(live[at - 1]), "reserved": reserved[at]} for name, at in of_step.items()}
            for of_step in ends
        ]
        ends_of = log.step_start, *log.step_ends
        by_step = [reserved[at] for at in ends_of]
        so_far = [(0, 0.0), *(dict(zip(stops, found.returned, strict=True))[at] for at in ends_of)]
        within = [(n - before[0], s - before[1]) for before, (n, s) in pairwise(so_far)]
        return cls(setup, peaks, by_step, [{}, *phase_ends], card.peak_reserved, failure, within)

    @property
    def peak(self) -> Peak:
        """The largest peak of a step."""
        return max(self.peaks, key=lambda peak: peak.nbytes)

    def _fits(self, step: int) -> bool:
        failure = self.failure
        return failure is None or step < failure.step or (step > 0 and failure.steps_fit)

    def rows(self, ranks: RankClass) -> list[dict[str, Any]]:
        """The rows of :attr:`Measurement.by_class` for the rank's class: set-up, then each step."""
        returned = self.returned or [(0, 0.0)] * (1 + len(self.peaks))
        return [
            {
                "rank": ranks.first,
                "ranks": len(ranks.ranks),
                "stage": ranks.stage.index,
                "step": step,
                "status": "ok" if self._fits(step) else "oom",
                "peak_memory_bytes": peak.nbytes,
                "peak_phase": peak.phase,
                "peak_held": {name: nbytes for name, nbytes in peak.held.items() if nbytes},
                "reserved_memory_bytes": reserved,
                "allocated_bytes": peak.at_end,
                "phase_ends": ends,
                **({"returned_bytes": freed, "returned_s": freed_s} if freed else {}),
            }
            for step, (peak, reserved, (freed, freed_s), ends) in enumerate(
                zip([self.setup, *self.peaks], self.reserved, returned, self.phase_ends, strict=True)
            )
        ]


def needs(memory: RankMemory, cell: Cell) -> str:
    """A line that says how many GiB a rank that does not fit would need, and which settings need less."""
    peak = memory.peak
    if memory.failure is not None and memory.failure.steps_fit:
        steps, setup = (each.nbytes / GIB for each in (peak, memory.setup))
        words = f"the steps fit at {steps:.1f} GiB, set-up does not: {setup:.1f} GiB"
        if cell.sizes.pp > 1:
            return words
        return (
            f"{words}; initialise on the meta device, as the backends zero2 and zero3 do (initialize: meta)"
        )
    words = f"the step needs {peak.nbytes / GIB:.1f} GiB at its peak"
    if sum(peak.held.get(name, 0) for name in MemoryLog.STATES) > peak.nbytes / 2:
        return f"{words}, most of it for model states, {_fewer_states(cell)}"
    if peak.held.get("activations", 0) > peak.nbytes / 2:
        return f"{words}, most of it for activations, of which recomputation keeps fewer"
    return words


def _fewer_states(cell: Cell) -> str:
    """In words, a setting by which a rank holds fewer model states, for example another backend."""
    if cell.strategy == OWN_STEP:
        return "of which more ranks can hold fewer each"
    classes, sizes = all_backends(), cell.sizes.by_axis
    here = classes[cell.training.backend]
    replicas = prod(n for axis, n in sizes.items() if axis not in ("pp", "tp"))
    if replicas > 1 and not getattr(backend_options(cell), "distributed_optimizer", True):
        return "of which distributed_optimizer shards the optimizer's over replicas"
    able = [each for each in classes.values() if each.searched and (each.pipelined or cell.sizes.pp == 1)]
    most = max(able, key=lambda each: len(each.shares_out or ()))
    if replicas > 1 and here.shares_out is not None and here.shares_out < (most.shares_out or frozenset()):
        return f"which the backend {most.name} shards over replicas"
    return "of which ranks along tp or pp hold fewer"


def usable_memory_bytes(cell: Cell, planned: Plan | None = None) -> int | None:
    """The bytes of a device that a cell's tensors and the allocator's waste can have; None: no limit.

    Args:
        planned: the plan of the cell, or of a cell that differs only in layers and micro-batches; None: this
            function makes the plan.

    Raises:
        Unsupported: the cell cannot run; only on clusters whose files give the bytes of NCCL's buffers.
    """
    usable = load_cluster(cell.cluster).usable_memory_bytes
    return None if usable is None else usable - (exchange_memory_bytes(cell, planned) or 0)


def exchange_memory_bytes(cell: Cell, planned: Plan | None = None) -> int | None:
    """The bytes of NCCL's buffers for all-to-alls on the device of rank 0, which has at least as many peers
    in its node as any rank; None: the cluster's file does not say. Only the largest communicator counts.

    An all-to-all connects each pair of devices of a node over each of NCCL's channels, with buffers of all
    protocols at either end (``p2pSendSetup`` and ``p2pRecvSetup`` of src/transport/p2p.cc). Buffers between
    nodes are shared (src/transport/net.cc), and count as 0 bytes. ``planned``: see
    :func:`usable_memory_bytes`.
    """
    cluster = load_cluster(cell.cluster)
    of_peer = cluster.device.memory_peer_bytes.value
    if of_peer is None:
        return None
    planned, most = planned or plan(cell), 0
    for entry in planned.traffic_of(0):
        if entry.collective == "all_to_all":
            group = Place.of_rank(planned.sizes, 0).members(*entry.axes)[: entry.group_size(planned.sizes)]
            most = max(most, sum(node_of(rank, cluster) == 0 for rank in group) - 1)
    return most * of_peer
