"""A step program: the events of one rank in a training step, as arrays, ready to be timed.

A program is traced on one rank and holds for all ranks that run the same program. So its groups and peers are
relative to the mesh (row-major), not rank numbers: a group has the coordinates of its members along the axes
on which they differ, a peer has its distance along each axis.

Sums over a program's kernels are here too: seconds by kind, and FLOPs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Self

import numpy as np

#: the stream on which a step computes; other streams have a library's own copies and collectives
COMPUTE_STREAM = 0
#: rows of matrices must be a multiple of this many bytes for cuBLAS's fast kernels
ALIGNED = 16
#: precisions of kernels, by their numbers in programs
PRECISION_NAMES = ("fp16", "bf16", "fp32", "fp64", "other", "fp8")

#: kinds of host work other than dispatching events, as :attr:`Program.host` counts them: operators that
#: launch no kernel, autograd nodes, calls of modules, waits of the host for its device, and checks of a
#: queue, at each of which the host waits until the device has done what was launched three checks before
HOST_WORK = ("views", "nodes", "modules", "joins", "checks")

Mesh = tuple[int, ...]


class Kind:
    """The kinds of events of a program."""

    KERNEL, COLLECTIVE, SEND, RECV, WAIT, RECORD = range(6)


class Category:
    """The categories of kernels, by the rate that prices them, and their names by number."""

    MEMORY_BOUND, MATMUL, ATTENTION, HOST_COPY, HOST_UPDATE, HOST_READ = range(6)
    NAMES = ("memory-bound", "matmul", "attention", "host copy", "host update", "host read")


def coordinates(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """The coordinates of a rank on the mesh."""
    return tuple(int(c) for c in np.unravel_index(rank, mesh))


@dataclass(frozen=True)
class Group:
    """A kind of process group, relative to any of its members.

    Attributes:
        axes: indices of the mesh axes on which members differ.
        places: coordinates of each member along these axes, in the order of the group's ranks, counted
            from the start of the run.
        runs: for each of these axes, the length of the runs of coordinates into which groups of this kind
            cut the axis; empty if no axis is cut.
        steps: for each of these axes, the distance between members; empty if all distances are 1.
        stage: for a group along folded axes (:mod:`spbench.impls.folding`) that is no block of the mesh:
            (the index of the axis of pipeline stages, the distance between members in the numbers of a
            stage's ranks); ``places`` are then 0, 1, ... along no axis. Else empty.
    """

    axes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    runs: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], mesh: Mesh, pipeline: int | None = None) -> Self:
        """The kind of group to which the group of these global ranks belongs.

        Args:
            pipeline: the index of the axis of pipeline stages; None: no axes are folded.
        """
        coords = [coordinates(rank, mesh) for rank in ranks]
        axes = tuple(i for i in range(len(mesh)) if len({c[i] for c in coords}) > 1)
        runs = tuple(_run([c[i] for c in coords], mesh[i]) for i in axes)
        steps = tuple(_step([c[i] for c in coords], mesh[i]) for i in axes)
        along = list(zip(axes, runs, steps, strict=True))
        places = tuple(tuple(c[i] % run // step * step for i, run, step in along) for c in coords)
        cut = any(mesh[i] > run for i, run, _ in along)
        different = [len({c[i] for c in coords}) for i in axes]
        uneven = any(
            n < mesh[i] == run and step == 1 for n, (i, run, step) in zip(different, along, strict=True)
        )
        if pipeline is not None and (uneven or len(ranks) < prod(different)):
            distance = _distance(ranks, mesh, pipeline)
            if distance:
                return cls((), tuple((n,) for n in range(len(ranks))), stage=(pipeline, distance))
        return cls(axes, places, runs if cut else (), steps if max(steps, default=1) > 1 else ())

    def members(self, rank: int, mesh: Mesh) -> tuple[int, ...]:
        """The global ranks of the group of this kind to which a rank belongs."""
        return tuple(self.members_by_rank(np.array([rank]), mesh)[0].tolist())

    def members_by_rank(self, ranks: np.ndarray, mesh: Mesh) -> np.ndarray:
        """[ranks, size]: the global ranks of the group of this kind to which each of ``ranks`` belongs."""
        if self.stage:
            return self._members_in_stage(ranks, mesh)
        coords = list(np.unravel_index(ranks[:, None], mesh))
        places = np.array(self.places, dtype=np.int64).reshape(len(self.places), len(self.axes))
        runs = self.runs or [mesh[axis] for axis in self.axes]
        steps = self.steps or [1] * len(self.axes)
        for axis, run, step, along in zip(self.axes, runs, steps, places.T, strict=True):
            coords[axis] = coords[axis] // run * run + coords[axis] % step + along[None]
        members = np.ravel_multi_index(tuple(coords), mesh)
        return np.broadcast_to(members, (len(ranks), len(self.places)))

    def _members_in_stage(self, ranks: np.ndarray, mesh: Mesh) -> np.ndarray:
        (pipeline, distance), count = self.stage, len(self.places)
        numbers, stages = _in_stage(ranks, mesh, pipeline)
        first = numbers // (count * distance) * (count * distance) + numbers % distance
        of_stage = tuple(n for axis, n in enumerate(mesh) if axis != pipeline)
        other = first[:, None] + distance * np.arange(count)
        coords = list(np.unravel_index(other, of_stage))
        coords.insert(pipeline, np.broadcast_to(stages[:, None], other.shape))
        return np.asarray(np.ravel_multi_index(tuple(coords), mesh))


def _in_stage(ranks: np.ndarray, mesh: Mesh, pipeline: int) -> tuple[np.ndarray, np.ndarray]:
    """The ranks' numbers within their pipeline stage, and the numbers of their stages."""
    coords = list(np.unravel_index(ranks, mesh))
    stages = coords.pop(pipeline)
    of_stage = tuple(n for axis, n in enumerate(mesh) if axis != pipeline)
    return np.asarray(np.ravel_multi_index(tuple(coords), of_stage)), stages


def _distance(ranks: Sequence[int], mesh: Mesh, pipeline: int) -> int:
    """The distance between consecutive ranks' numbers in their pipeline stage, if groups with that distance
    fill the stage; else 0."""
    numbers, stages = _in_stage(np.array(ranks), mesh, pipeline)
    distance = int(numbers[1] - numbers[0])
    block = len(ranks) * distance
    even = distance > 0 and prod(mesh) // mesh[pipeline] % block == 0 and len({*stages.tolist()}) == 1
    first = numbers[0] // block * block + numbers[0] % distance if even else 0
    return distance if even and (numbers == first + distance * np.arange(len(ranks))).all() else 0


def _run(along: Sequence[int], size: int) -> int:
    """The number of consecutive coordinates that a group has along an axis of ``size``, if runs of that
    length fill the axis; else ``size``, as for the only group of its kind."""
    first, length = min(along), len(set(along))
    consecutive = max(along) - first + 1 == length
    return length if consecutive and first % length == 0 and size % length == 0 else size


def _step(along: Sequence[int], size: int) -> int:
    """The distance between a group's coordinates along an axis of ``size``, if groups with that distance fill
    the axis; else 1."""
    first, second = sorted({*along})[:2]
    step = second - first
    return step if {*along} == {*range(first, size, step)} and first < step and size % step == 0 else 1


def offset(rank: int, peer: int, mesh: Mesh) -> tuple[int, ...]:
    """The distance from a rank to its peer along each mesh axis, counted upwards and round the end."""
    pairs = zip(coordinates(rank, mesh), coordinates(peer, mesh), mesh, strict=True)
    return tuple((b - a) % n for a, b, n in pairs)


def shifted(rank: int, by: Sequence[int], mesh: Mesh) -> int:
    """The rank at the distance ``by`` from a rank; see :func:`offset`."""
    return int(shifted_ranks(np.array(rank), by, mesh))


def shifted_ranks(ranks: np.ndarray, by: Sequence[int], mesh: Mesh) -> np.ndarray:
    """For each rank, the rank at the distance ``by`` from it; see :func:`offset`."""
    coords = np.unravel_index(ranks, mesh)
    return np.asarray(
        np.ravel_multi_index(tuple((c + d) % n for c, d, n in zip(coords, by, mesh, strict=True)), mesh)
    )


@dataclass(frozen=True)
class Program:
    """One rank's events in order. Arrays have one entry for each event.

    Attributes:
        mesh: ranks along each axis, from the slowest-varying to the fastest.
        kind: one of :class:`Kind`.
        stream: the stream on which the event was issued; a stream runs its events in order, and stands still
            at a wait. COMPUTE_STREAM unless a library has streams of its own.
        whose: the ranks that do the event's work, see :mod:`spbench.impls.observed_work`: EVERYONE; ALL_LOWER
            for a kernel on the blocks of all lower ranks at once; or, for a kernel on the block of one lower
            rank, the number of lower ranks.
        name: index into ``names``: the operator, or the collective.
        category: for a kernel: one of :class:`Category`. During a HOST_UPDATE, on the host's cores, the host
            and the compute stream stand still.
        nbytes: for a kernel, bytes read and written; for a HOST_COPY, bytes copied; for communication, bytes
            of the payload as :data:`WIRE_SHARE` defines it.
        flops: floating-point operations.
        precision: index into PRECISION_NAMES, for a kernel's operands.
        shape: [events, 4]: batch, m, n, k of a matmul; sequences x heads, queries, keys and head size of an
            attention kernel that stores no scores; steps and recurrences of a scan (``Device.scans``).
        strided: elements of a matmul's operands and result that are blocks of wider matrices.
        aligned: bytes, up to ALIGNED, of which the rows of a matmul's operands and result are a multiple.
        host: [events, kinds of HOST_WORK]: the host's work since the event before, without the dispatch.
        partner: for a collective an index into ``groups``; for a send or receive an index into ``peers``; for
            a wait the event of the awaited communication, or of the awaited record of another stream; -1 for
            kernels and records.
        marks: (phase, the phase's first event), in order; a phase may come again.
        unpriced: the operators among ``names`` whose cost is not known (:attr:`Price.known`).
        lines: the user's line of events that communicate, as "step.py:31".
    """

    mesh: Mesh
    kind: np.ndarray
    stream: np.ndarray
    whose: np.ndarray
    name: np.ndarray
    category: np.ndarray
    nbytes: np.ndarray
    flops: np.ndarray
    precision: np.ndarray
    shape: np.ndarray
    strided: np.ndarray
    aligned: np.ndarray
    host: np.ndarray
    partner: np.ndarray
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    peers: tuple[tuple[int, ...], ...]
    marks: tuple[tuple[str, int], ...]
    unpriced: tuple[str, ...] = ()
    lines: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def world(self) -> int:
        return prod(self.mesh)

    def of(self, category: int) -> np.ndarray:
        """[events]: whether an event is a kernel of a category."""
        kernels: np.ndarray = (self.kind == Kind.KERNEL) & (self.category == category)
        return kernels

    def calls_of(self, names: Collection[str]) -> np.ndarray:
        """[events]: whether an event is a call of one of the named operators."""
        return np.isin(self.name, [number for number, name in enumerate(self.names) if name in names])

    def unpriced_calls(self) -> dict[str, int]:
        """The number of calls of each operator without a known price, by its name."""
        return {name: int(self.calls_of([name]).sum()) for name in self.unpriced}

    def phase_of(self, event: int) -> str:
        """The name of the phase to which an event belongs; "" before the first phase."""
        return next((name for name, first in reversed(self.marks) if first <= event), "")

    def describe(self, event: int, rank: int) -> str:
        """An event in words, with the ranks that communicate with ``rank``."""
        kind, partner = int(self.kind[event]), int(self.partner[event])
        if kind == Kind.WAIT:
            return "wait for " + self.describe(partner, rank)
        if kind == Kind.RECORD:
            return f"event {event} (a point of stream {self.stream[event]})"
        words = f"{self.names[self.name[event]]} of {self.nbytes[event]:.0f} bytes"
        if kind in (Kind.SEND, Kind.RECV):
            peer = shifted(rank, self.peers[partner], self.mesh)
            words += f" {'to' if kind == Kind.SEND else 'from'} rank {peer}"
        elif kind == Kind.COLLECTIVE:
            words += f" over ranks {list(self.groups[partner].members(rank, self.mesh))}"
        line = f" at {self.lines[event]}" if event in self.lines else ""
        return f"event {event} ({words}, {self.phase_of(event) or 'no phase'}){line}"


def seconds_by_kind(program: Program, kernel_s: np.ndarray) -> dict[str, float]:
    """The seconds of the compute stream's kernels, by "matmul", "attention" and "memory_bound".

    Args:
        kernel_s: [events]: the seconds of each event as a kernel.
    """
    of_compute = (program.kind == Kind.KERNEL) & (program.stream == COMPUTE_STREAM)
    # a separate softmax only moves bytes
    attention = program.of(Category.ATTENTION) & (program.flops > 0)
    matmuls = program.of(Category.MATMUL)
    kinds = {"matmul": matmuls, "attention": attention, "memory_bound": ~(matmuls | attention)}
    return {name: float(kernel_s[of_compute & of_kind].sum()) for name, of_kind in kinds.items()}


class Flops(NamedTuple):
    """FLOPs of matmuls and attention: in ``forward`` phases, of the ``attention`` in these phases, and in
    ``all`` phases, with the recomputation in backward."""

    forward: float
    attention: float
    all: float

    def times(self, number: float) -> Self:
        """These FLOPs times ``number``, for example a number of ranks."""
        return type(self)(*(number * each for each in self))

    def plus(self, other: Self) -> Self:
        """The sums of these FLOPs and ``other``'s."""
        return type(self)(*(a + b for a, b in zip(self, other, strict=True)))


def flops_of(program: Program, weights: np.ndarray | None = None) -> Flops:
    """The FLOPs of a rank that runs a program.

    Args:
        weights: [events]: the share of each event that the rank does; None: all of each event.
    """
    flops = program.flops if weights is None else program.flops * weights
    counted = np.where(program.category != Category.MEMORY_BOUND, flops, 0.0)
    attention, ends = program.of(Category.ATTENTION), [first for _, first in program.marks[1:]]
    total = Flops(0.0, 0.0, float(counted.sum()))
    for (phase, first), end in zip(program.marks, [*ends, len(program)], strict=True):
        if phase == "forward":
            here = counted[first:end]
            of_attention = float(here[attention[first:end]].sum())
            total = total.plus(Flops(float(here.sum()), of_attention, 0.0))
    return total
