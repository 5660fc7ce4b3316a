"""A step program: what one rank does in a training step, as arrays, ready to be timed.

A program is traced on one rank and stands for all ranks that run the same one. So its groups and peers are
kept relative to the mesh (row-major), not as rank numbers: a group by the coordinates of its members along
the axes on which they differ, a peer by its distance along each axis.

What the kernels of a step are: seconds by their kind, the FLOPs of its model, and the calls of softmax
attention by what their rate on a card depends on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.clusters.rates import Direction, Mask

#: kinds of events of a program
KERNEL, COLLECTIVE, SEND, RECV, WAIT, RECORD = range(6)
#: the stream on which a step computes; others have the copies and collectives of a library's own streams
COMPUTE_STREAM = 0
#: categories of kernels, by what prices them
MEMORY_BOUND, MATMUL, ATTENTION, HOST_COPY, HOST_UPDATE, HOST_READ = range(6)
CATEGORIES = ("memory-bound", "matmul", "attention", "host copy", "host update", "host read")
#: bytes that rows of matrices are a multiple of where cuBLAS runs its fast kernels
ALIGNED = 16
#: precisions of kernels, by their numbers in programs
PRECISION_NAMES = ("fp16", "bf16", "fp32", "fp64", "other", "fp8")

#: what a host does beside dispatching a program's events, as :attr:`Program.host` counts it: operators that
#: launch nothing, nodes of autograd run, calls of modules, and waits of the host for its device
HOST_WORK = ("views", "nodes", "modules", "joins")

Mesh = tuple[int, ...]


def coordinates(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Where a rank lies on the mesh."""
    return tuple(int(c) for c in np.unravel_index(rank, mesh))


@dataclass(frozen=True)
class Group:
    """A process group as any of its members sees it.

    Attributes:
        axes: indices of the mesh axes on which members differ.
        places: coordinates of each member along these axes, in the order of the group's ranks, counted
            from the start of the run.
        runs: for each of these axes, the length of the runs of coordinates into which it is cut, each a group
            of this kind; empty where no axis is cut.
        steps: for each of these axes, the distance of its members; empty where all have neighbours.
        stage: of a group along folded axes (:mod:`spbench.impls.folding`) that is no block of the mesh: the
            index of the axis of pipeline stages, and the distance of members in the numbers of a stage's
            ranks; ``places`` are then 0, 1, ... along no axis. Else empty.
    """

    axes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    runs: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], mesh: Mesh, pipeline: int | None = None) -> Group:
        """The group of these global ranks.

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
        """Global ranks of the group of this kind that a rank belongs to."""
        return tuple(self.members_by_rank(np.array([rank]), mesh)[0].tolist())

    def members_by_rank(self, ranks: np.ndarray, mesh: Mesh) -> np.ndarray:
        """[ranks, size]: global ranks of the group of this kind that each of the ranks belongs to."""
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
    """By how much the ranks' numbers in their pipeline stage differ, one to the next, if groups of that
    distance make up the stage; else 0."""
    numbers, stages = _in_stage(np.array(ranks), mesh, pipeline)
    distance = int(numbers[1] - numbers[0])
    block = len(ranks) * distance
    even = distance > 0 and prod(mesh) // mesh[pipeline] % block == 0 and len({*stages.tolist()}) == 1
    first = numbers[0] // block * block + numbers[0] % distance if even else 0
    return distance if even and (numbers == first + distance * np.arange(len(ranks))).all() else 0


def _run(along: Sequence[int], size: int) -> int:
    """How many consecutive coordinates a group has along an axis of ``size``, if runs of that length fill the
    axis; else ``size``, as for a group that is the only one of its kind."""
    first, length = min(along), len(set(along))
    consecutive = max(along) - first + 1 == length
    return length if consecutive and first % length == 0 and size % length == 0 else size


def _step(along: Sequence[int], size: int) -> int:
    """The distance of a group's coordinates along an axis of ``size``, if groups of that distance fill the
    axis; else 1."""
    first, second = sorted({*along})[:2]
    step = second - first
    return step if {*along} == {*range(first, size, step)} and first < step and size % step == 0 else 1


def offset(rank: int, peer: int, mesh: Mesh) -> tuple[int, ...]:
    """The distance of a peer along each axis, counted upwards and round the end."""
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
    """One rank's events in order. Arrays have one entry an event.

    Attributes:
        mesh: ranks along each axis, from the slowest-varying to the fastest.
        kind: KERNEL, COLLECTIVE, SEND, RECV, WAIT or RECORD.
        stream: on which the event was issued; events of a stream go in order, and a stream stands still at a
            wait. COMPUTE_STREAM unless a library has streams of its own.
        whose: of which ranks an event is, see :mod:`spbench.impls.unlike_work`: EVERYONE; ALL_LOWER, of
            a kernel for the blocks of all lower ranks at once; or, of one for the block of one of them, how
            many lower ranks there are.
        name: index into ``names``: the operator, or the collective.
        category: of a kernel: MEMORY_BOUND, MATMUL, ATTENTION, HOST_COPY, or HOST_UPDATE: the host's
            cores do it, while the host and the compute stream stand still.
        nbytes: of a kernel, bytes read and written, of a HOST_COPY those copied; of communication, bytes of
            the payload as :data:`WIRE_SHARE` defines it.
        flops: floating-point operations.
        precision: index into PRECISION_NAMES, of a kernel's operands.
        shape: [events, 4]: batch, m, n, k of a matmul; sequences x heads, queries, keys and head
            size of an attention without scores.
        strided: elements of a matmul's operands and result that are blocks of wider matrices.
        aligned: bytes, up to ALIGNED, of which the rows of a matmul's operands and result are a multiple.
        host: [events, kinds of HOST_WORK]: what the host did since the event before; the event's own dispatch
            is not in it.
        partner: of a collective an index into ``groups``, of a send or recv into ``peers``, of a wait
            the event that is waited for: communication, or the record of a point of another stream; -1 for
            kernels and records.
        marks: (phase, its first event), in order; a phase may come again.
        unpriced: of ``names`` the operators whose cost is not known (:attr:`Price.known`).
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

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def world(self) -> int:
        return prod(self.mesh)

    def calls_of(self, names: Collection[str]) -> np.ndarray:
        """[events]: whether an event is a call of one of the named operators."""
        return np.isin(self.name, [number for number, name in enumerate(self.names) if name in names])

    def unpriced_calls(self) -> dict[str, int]:
        """How often each of the operators without a known price is called."""
        return {name: int(self.calls_of([name]).sum()) for name in self.unpriced}

    def phase_of(self, event: int) -> str:
        """The phase that an event belongs to."""
        return next((name for name, first in reversed(self.marks) if first <= event), "")

    def describe(self, event: int, rank: int) -> str:
        """An event in words, as a rank that runs the program sees it."""
        kind, partner = int(self.kind[event]), int(self.partner[event])
        if kind == WAIT:
            return "wait for " + self.describe(partner, rank)
        if kind == RECORD:
            return f"event {event} (a point of stream {self.stream[event]})"
        words = f"{self.names[self.name[event]]} of {self.nbytes[event]:.0f} bytes"
        if kind in (SEND, RECV):
            peer = shifted(rank, self.peers[partner], self.mesh)
            words += f" {'to' if kind == SEND else 'from'} rank {peer}"
        elif kind == COLLECTIVE:
            words += f" over ranks {list(self.groups[partner].members(rank, self.mesh))}"
        return f"event {event} ({words}, {self.phase_of(event) or 'no phase'})"


#: PRECISION_NAMES begin with so many half precisions, which attention kernels' rates are of
_HALVES = 2


class AttentionCall(NamedTuple):
    """Calls of a kernel that are alike.

    Attributes:
        heads: of all sequences.
        length: the lesser of queries and keys.
        queries: of each.
    """

    direction: Direction
    mask: Mask
    head_size: int
    heads: int
    keys: int
    length: int
    queries: int


def attention_calls(program: Program) -> Iterator[tuple[AttentionCall, np.ndarray]]:
    """The calls of attention in half precision that make no scores: each kind of call, with its events."""
    attends = (program.category == ATTENTION) & (program.precision < _HALVES) & program.shape.any(axis=1)
    calls = np.column_stack([program.name[attends], program.shape[attends], program.flops[attends]])
    # the calls of a ring are the same one after another
    first = np.append(True, (calls[1:] != calls[:-1]).any(1))[: len(calls)]
    kinds, places = np.unique(calls[first], axis=0, return_inverse=True)
    places = places.ravel()[np.cumsum(first) - 1]
    at = np.flatnonzero(attends)
    for place, (name, heads, queries, keys, head_size, flops) in enumerate(kinds):
        backward = program.names[int(name)].endswith("_backward")
        pairs = flops / (2 * head_size * (5 if backward else 2))  # as forward_flops and backward_flops
        mask: Mask = "causal" if pairs < heads * queries * keys else "whole"
        direction: Direction = "backward" if backward else "forward"
        length = min(int(queries), int(keys))
        call = AttentionCall(direction, mask, int(head_size), int(heads), int(keys), length, int(queries))
        yield call, at[places == place]


def seconds_by_kind(program: Program, kernel_s: np.ndarray) -> dict[str, float]:
    """Seconds of the kernels of the compute stream by their kind.

    Args:
        kernel_s: of each event.
    """
    of_compute = (program.kind == KERNEL) & (program.stream == COMPUTE_STREAM)
    attention = (program.category == ATTENTION) & (program.flops > 0)  # a softmax alone moves bytes
    matmuls = program.category == MATMUL
    kinds = {"matmul": matmuls, "attention": attention, "memory_bound": ~(matmuls | attention)}
    return {name: float(kernel_s[of_compute & of_kind].sum()) for name, of_kind in kinds.items()}


class Flops(NamedTuple):
    """FLOPs of matmuls and attention: of ``forward`` phases, of the softmax ``attention`` in these, and of
    ``all`` phases, with what backward computes again."""

    forward: float
    attention: float
    all: float

    def times(self, number: float) -> Flops:
        """The FLOPs of ``number`` such ranks."""
        return Flops(*(number * each for each in self))

    def plus(self, other: Flops) -> Flops:
        """The sums of these FLOPs and ``other``'s."""
        return Flops(*(a + b for a, b in zip(self, other, strict=True)))


def flops_of(program: Program, weights: np.ndarray | None = None) -> Flops:
    """The FLOPs of a rank.

    Args:
        weights: how much of each event it does; None: all.
    """
    flops = program.flops if weights is None else program.flops * weights
    counted = np.where((program.kind == KERNEL) & (program.category != MEMORY_BOUND), flops, 0.0)
    attention, ends = program.category == ATTENTION, [first for _, first in program.marks[1:]]
    total = Flops(0.0, 0.0, float(counted.sum()))
    for (phase, first), end in zip(program.marks, [*ends, len(program)], strict=True):
        if phase == "forward":
            here = counted[first:end]
            of_attention = float(here[attention[first:end]].sum())
            total = total.plus(Flops(float(here.sum()), of_attention, 0.0))
    return total
