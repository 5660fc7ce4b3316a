"""The trace of a deep model, put together from those of two shallow ones.

Each list of a trace is aligned by itself (:mod:`measure.engines.repeating_runs`). Two things may always
grow with the number of layers: what an operator that takes lists of tensors reads and writes, as an
optimizer's does, and the host's work. A buffer or a message of all layers may where the backend says that its
cuts do not depend on how many there are (:meth:`Backend.cuts`), outside forward and backward alone.

A layer takes as long to trace as any other, and the layers of a model are alike. So few are traced: models of
3 and 5 layers, from which that of all layers is put together, and one of 4, which is the proof: what is put
together for 4 layers must equal it in every field. If it does not, or a list of the two is no list of like
blocks, the whole model is traced. A guess takes the models of 3 and 5 layers, and does without the proof.

What the proof cannot show is a limit that 5 layers do not reach. So nothing may grow with the number of
layers that could have one (:mod:`measure.engines.deepened_traces`), unless the backend says that it
cuts its buffers alike in all four models (:meth:`Backend.cuts`); if it does not, the whole one is traced at
once, and guessed as if it did. A model says how often its kinds of layers repeat (:attr:`Model.period`) after
the first ones, of which all models have as many more (:attr:`Model.unlike_layers`), and
it is trusted that a layer does not depend on its number otherwise. A test compares traces with whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Literal, NamedTuple

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.listed import (
    NotAlike,
    columns_of,
    listed_log,
    listed_program,
    log_in_order,
    program_in_order,
)
from spbench.bench.measure.engines.plan import planned_step
from spbench.bench.measure.engines.repeating_runs import DeepList
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation
from spbench.impls import backend_class, model_preset

#: how a trace is made; see :func:`measure.engines.tracing.trace`
Effort = Literal["whole", "proved", "guess", "few"]
#: the layers of the shallowest model: with fewer, a first or last one would be beside each other
_FEWEST = 3
#: the fewest layers of which tracing all takes longer than tracing 3 and 5, and 4 for the proof
LEAST: dict[Effort, int] = {"proved": 20, "guess": 9, "few": 9}


class FewLayers(NamedTuple):
    """Cells of few layers, from whose traces the trace of a deep cell is put together.

    Attributes:
        sources: two cells; the second has two layers, or runs of layers that repeat, more.
        proof: a cell with one layer more than the first; None: nothing is proved.
        more: by how many layers, or runs, the deep cell has more than the first.
        grows: whether buffers and messages of all layers may grow, outside forward and backward.
    """

    sources: tuple[Cell, Cell]
    proof: Cell | None
    more: int
    grows: bool


def stage_layers(cell: Cell) -> tuple[int, int]:
    """(layers of a stage, counted in units; layers of the model for one unit), a unit being layers computed
    again together; 0 if the model has no number of layers, or its kinds do not repeat alike in each stage."""
    model = model_preset(*cell.model_arguments)
    together = getattr(model, "recompute_layers", 1) if getattr(model, "recomputes_layers", False) else 1
    unit = cell.sizes.pp * cell.training.virtual_stages * math.lcm(together, model.period)
    layers = getattr(model, "layers", 0)
    return 0 if model.period > 1 and layers % unit else layers // unit, unit


def leading_runs(cell: Cell) -> int:
    """The layers of a stage, counted as by :func:`stage_layers`, that hold the first layers of a model that
    are of another kind."""
    layers, unit = stage_layers(cell)
    leading = model_preset(*cell.model_arguments).unlike_layers
    here = unit // (cell.sizes.pp * cell.training.virtual_stages)
    return math.ceil(leading / here) if layers else 0


def with_layers(cell: Cell, layers: int) -> Cell:
    """The cell of a model with that many layers."""
    return cell.model_copy(update={"model_options": {**cell.model_options, "layers": layers}})


def few_layers(cell: Cell, rank: int, effort: Effort) -> FewLayers | None:
    """The cells of few layers whose traces give that of a rank; None where tracing all layers is as quick.

    Raises:
        NotAlike: the backend cuts buffers of all layers otherwise than those of few.
        Unsupported: the strategy cannot run so few layers.
    """
    (layers, unit), leading = stage_layers(cell), leading_runs(cell)
    if effort == "whole" or layers < LEAST[effort] + leading or cell.training.stage_layers is not None:
        return None
    left_over = getattr(model_preset(*cell.model_arguments), "layers", 0) - layers * unit
    # the first layers, where they are unlike those that repeat, are in all of them
    fewest = _FEWEST + leading
    if layers < fewest + 3:
        return None
    few, proof, some = (with_layers(cell, n * unit + left_over) for n in range(fewest, fewest + 3))
    cuts, more = _cuts(few, rank), layers - fewest
    if effort != "proved":
        return FewLayers((few, some), None, more, cuts is not None)
    if any(_cuts(each, rank) != cuts for each in (proof, some, cell)):
        raise NotAlike("its backend cuts the buffers of all layers and of few otherwise")
    return FewLayers((few, some), proof, more, cuts is not None)


def _cuts(cell: Cell, rank: int) -> Hashable:
    if cell.training.step == "inference":
        return None
    return backend_class(cell.training.backend).cuts(planned_step(cell, rank, ()))


#: how operators begin that take lists of tensors, of which a deeper model has longer ones
_OF_LISTS = ("_foreach_", "_fused_", "sum_of_squares")
#: and those that take a buffer of all layers in forward or backward, where there is one
_OF_BUFFERS = ("zero_", "linalg_vector_norm")
#: the phases whose buffers do not grow with the number of layers
_OF_LAYERS = ("forward", "backward")
#: what stands for a number that grows
_GROWS = -1
#: the most that a column of :attr:`Program.host` can be
_MOST_HOST_WORK = 2**15 - 1


def _outside(marks: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """[length]: whether each entry of a list is outside forward and backward."""
    first = [0, *(start for _, start in marks), length]
    outside = [True, *(name not in _OF_LAYERS for name, _ in marks)]
    return np.repeat(outside, np.diff(first))


def _without_what_grows(columns: Sequence[np.ndarray], may: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Two columns, where numbers that only one column has become _GROWS, if the entry ``may`` grow."""
    return [
        np.where(here & ~np.isin(column, other[there]), _GROWS, column)
        for column, other, here, there in zip(columns, columns[::-1], may, may[::-1], strict=True)
    ]


def _grown(column: np.ndarray, by_two_layers: np.ndarray, layers: int) -> np.ndarray:
    """A column after its growth.

    Raises:
        NotAlike: a number would not be whole.
    """
    grown = column + by_two_layers * ((layers - 2) / 2)
    if (grown != np.rint(grown)).any():
        raise NotAlike("something does not grow by the same with each layer")
    return grown.astype(column.dtype)


class _DeepLog:
    """The memory log of a deeper model."""

    def __init__(self, shallow: MemoryLog, deeper: MemoryLog, grows: bool):
        if shallow.place_names != deeper.place_names:
            raise NotAlike("other modules are called in a deeper model")
        self._log = deeper
        logs = shallow, deeper
        events = [np.asarray(log.events, dtype=np.int64) for log in logs]
        # of each event, the bytes of its storage, and whether it was made where it may grow
        pairs = [*zip(logs, events, strict=True)]
        sizes = [np.asarray(log.sizes, dtype=np.int64)[np.abs(each) - 1] for log, each in pairs]
        may = [grows & _outside(log.marks, len(each))[each > 0][np.abs(each) - 1] for log, each in pairs]
        alike = _without_what_grows(sizes, may)
        self._list = DeepList(
            *(listed_log(log, each, log.ends) for log, each in zip(logs, alike, strict=True))
        )
        # of each storage, by its number
        self._growth = np.zeros(len(deeper.sizes))
        born = events[1] > 0
        self._growth[events[1][born] - 1] = self._list.growth(*sizes)[born]

    def by(self, layers: int) -> MemoryLog:
        sizes = _grown(np.asarray(self._log.sizes, dtype=np.int64), self._growth, layers)
        return log_in_order(self._log, self._list.by(layers), sizes)


class _DeepProgram:
    """The program of a deeper model."""

    def __init__(self, shallow: Program, deeper: Program, grows: bool):
        self._program = deeper
        columns = columns_of(deeper)
        others = [each.name for each in fields(Program) if each.name not in {*columns, "marks"}]
        if any(getattr(shallow, name) != getattr(deeper, name) for name in others):
            raise NotAlike("a deeper model calls other operators, or communicates in other groups")
        programs = shallow, deeper
        may = [grows & _outside(program.marks, len(program)) for program in programs]
        pairs = {name: [getattr(each, name) for each in programs] for name in ("nbytes", "flops", "host")}
        alike = {name: _without_what_grows(pairs[name], may) for name in ("nbytes", "flops")}
        lists = []
        for number, program in enumerate(programs):
            names = (*_OF_LISTS, *(_OF_BUFFERS if grows else ()))
            of_lists = np.array([name.startswith(names) for name in program.names], dtype=bool)
            takes_lists = of_lists[program.name]
            amounts = {name: np.where(takes_lists, _GROWS, both[number]) for name, both in alike.items()}
            lists.append(listed_program(program, **amounts))
        self._list = DeepList(*lists)
        self._growth = {name: self._list.growth(*pair) for name, pair in pairs.items()}

    def by(self, layers: int) -> Program:
        grown = {}
        for name, growth in self._growth.items():
            column = getattr(self._program, name)
            wide = _grown(column.astype(np.float64), growth, layers)
            if name == "host" and (wide > _MOST_HOST_WORK).any():
                raise NotAlike("the host does more between two events than a program can have")
            grown[name] = wide.astype(column.dtype)
        return program_in_order(self._program, self._list.by(layers), **grown)


class _DeepCounts:
    """The counts of communication of a deeper model."""

    def __init__(self, shallow: CommunicationMeter, deeper: CommunicationMeter, grows: bool):
        self._shallow, self._deeper = shallow, deeper
        alike = len(shallow.counts) == len(deeper.counts) and shallow.axes == deeper.axes
        for a, b in zip(shallow.counts, deeper.counts, strict=False):
            may = grows and b.phase not in _OF_LAYERS
            alike = alike and a == (replace(b, payload_bytes=a.payload_bytes) if may else b)
        if not alike:
            raise NotAlike("a deeper model sends other messages")

    def by(self, layers: int) -> CommunicationMeter:
        counts: dict[Operation, int] = {}
        pairs = zip(self._shallow.counts.items(), self._deeper.counts.items(), strict=True)
        for (before, n), (which, more) in pairs:
            growth = np.array([which.payload_bytes - before.payload_bytes, more - n], dtype=np.float64)
            payload, count = _grown(np.array([which.payload_bytes, more]), growth, layers).tolist()
            counts[replace(which, payload_bytes=payload)] = count
        return self._deeper.with_counts(counts)


class DeepTrace:
    """The trace of a deeper model, worked out from the traces of two shallow models.

    Args:
        shallow, deeper: of models of n and n + 2 layers, or runs of layers that repeat.
        grows: whether buffers and messages of all layers may grow, outside forward and backward.

    Raises:
        NotAlike: the two traces do not determine the deeper one's.
    """

    def __init__(self, shallow: Trace, deeper: Trace, *, grows: bool):
        self._trace = deeper
        self._memory = _DeepLog(shallow.memory, deeper.memory, grows)
        self._host_memory = _DeepLog(shallow.host_memory, deeper.host_memory, grows)
        self._counts = _DeepCounts(shallow.communication, deeper.communication, grows)
        self._program = None
        if shallow.program is not None and deeper.program is not None:
            self._program = _DeepProgram(shallow.program, deeper.program, grows)

    def by(self, layers: int) -> Trace:
        """The trace of a model with that many layers more than the shallower one.

        Raises:
            NotAlike: the two traces do not determine it.
        """
        return replace(
            self._trace,
            memory=self._memory.by(layers),
            host_memory=self._host_memory.by(layers),
            communication=self._counts.by(layers),
            program=None if self._program is None else self._program.by(layers),
        )
