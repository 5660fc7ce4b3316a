"""The trace of a deep model, put together from the traces of two shallow models.

The layers of a model are alike, and each takes equally long to trace. So models of 3 and 5 layers are traced,
and the trace of the deep model is put together from the two traces. A model of 4 layers gives the proof: the
trace put together for 4 layers must equal the traced one in every field. If the two differ, or if a list of
the two traces does not consist of like blocks, the whole model is traced. A guess leaves out the proof.

Each list of a trace is aligned separately (:mod:`measure.engines.repeating_runs`). Two numbers may always
grow with the number of layers: the bytes that an operator on lists of tensors reads and writes (for example
an optimizer's), and the host's work. A buffer or a message that spans all layers may grow only outside
forward and backward, and only if the backend cuts its buffers independently of the layers
(:meth:`Backend.cuts`), because the proof cannot show a limit on sizes that 5 layers do not reach. If the
backend cuts the four models' buffers unlike each other, the whole model is traced, and a guess ignores this.

A model says after how many layers its kinds of layers repeat (:attr:`Model.period`), and how many first
layers differ from the others (:attr:`Model.unlike_layers`). That a layer depends on its number in no other
way is an assumption; a test compares traces put together with traces of whole models.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Literal, NamedTuple

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import listed
from spbench.bench.measure.engines.plan import planned_step
from spbench.bench.measure.engines.repeating_runs import DeepList
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation
from spbench.impls import backend_class, model_preset

#: how many layers are run to make a trace; see :func:`measure.engines.tracing.trace`
Effort = Literal["whole", "proved", "guess", "few"]
#: the layers of the shallowest model: with fewer, no layer would lie between the first and the last
_FEWEST = 3
#: the fewest layers of a model for which tracing 3, 5 (and 4, for the proof) layers is quicker than all
LEAST: dict[Effort, int] = {"proved": 20, "guess": 9, "few": 9}


class FewLayers(NamedTuple):
    """Cells of few layers, from whose traces the trace of a deep cell is put together.

    Attributes:
        sources: two cells; the second has two layers (or two repeating units of layers) more than the first.
        proof: a cell with one layer or unit more than the first; None for a guess without a proof.
        more: how many layers or units the deep cell has more than the first.
        grows: whether buffers and messages that span all layers may grow outside forward and backward.
    """

    sources: tuple[Cell, Cell]
    proof: Cell | None
    more: int
    grows: bool


def stage_layers(cell: Cell) -> tuple[int, int]:
    """(units of layers in a stage; layers of the whole model for one unit in each stage). A unit is the least
    number of layers that are recomputed together and whose kinds repeat. The units are 0 if the model has no
    number of layers, or if its kinds of layers do not repeat alike in each stage."""
    model = model_preset(*cell.model_arguments)
    together = getattr(model, "recompute_layers", 1) if getattr(model, "recomputes_layers", False) else 1
    unit = cell.sizes.pp * cell.training.virtual_stages * math.lcm(together, model.period)
    layers = getattr(model, "layers", 0)
    return 0 if model.period > 1 and layers % unit else layers // unit, unit


def leading_runs(cell: Cell) -> int:
    """How many units (:func:`stage_layers`) of a stage hold the model's first, unlike layers."""
    layers, unit = stage_layers(cell)
    leading = model_preset(*cell.model_arguments).unlike_layers
    here = unit // (cell.sizes.pp * cell.training.virtual_stages)
    return math.ceil(leading / here) if layers else 0


def with_layers(cell: Cell, layers: int) -> Cell:
    """A copy of a cell whose model has that many layers."""
    return cell.model_copy(update={"model_options": {**cell.model_options, "layers": layers}})


def few_layers(cell: Cell, rank: int, effort: Effort) -> FewLayers | None:
    """The cells of few layers whose traces determine a rank's trace; None if tracing all layers is as quick.

    Raises:
        NotAlike: the backend cuts the buffers of all layers in another way than those of few layers.
        Unsupported: the strategy cannot run so few layers.
    """
    (layers, unit), leading = stage_layers(cell), leading_runs(cell)
    if effort == "whole" or layers < LEAST[effort] + leading or cell.training.stage_layers is not None:
        return None
    left_over = getattr(model_preset(*cell.model_arguments), "layers", 0) - layers * unit
    # each shallow model has all the first layers that are unlike the repeating ones
    fewest = _FEWEST + leading
    if layers < fewest + 3:
        return None
    few, proof, some = (with_layers(cell, n * unit + left_over) for n in range(fewest, fewest + 3))
    cuts, more = _cuts(few, rank), layers - fewest
    if effort != "proved":
        return FewLayers((few, some), None, more, cuts is not None)
    if any(_cuts(each, rank) != cuts for each in (proof, some, cell)):
        raise listed.NotAlike("its backend cuts the buffers of all layers and of few otherwise")
    return FewLayers((few, some), proof, more, cuts is not None)


def _cuts(cell: Cell, rank: int) -> Hashable:
    if cell.training.step == "inference":
        return None
    return backend_class(cell.training.backend).cuts(planned_step(cell, rank, ()))


#: the first letters of the names of operators on lists of tensors, which are longer in a deeper model
_OF_LISTS = ("_foreach_", "_fused_", "sum_of_squares")
#: the first letters of the names of operators on a buffer that spans all layers, in forward or backward
_OF_BUFFERS = ("zero_", "linalg_vector_norm")
#: the phases whose buffers do not grow with the number of layers
_OF_LAYERS = ("forward", "backward")
#: the value that replaces a number that grows with the layers, so that two lists compare as alike
_GROWS = -1
#: the largest number that :attr:`Program.host` can hold (int16)
_MOST_HOST_WORK = 2**15 - 1


def _outside(marks: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """[length]: whether each entry of a list is in a phase other than forward and backward.

    ``marks``: the name of each phase with its first entry, in order."""
    first = [0, *(start for _, start in marks), length]
    outside = [True, *(name not in _OF_LAYERS for name, _ in marks)]
    return np.repeat(outside, np.diff(first))


def _without_what_grows(columns: Sequence[np.ndarray], may: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Two columns in which a number that only one column contains is _GROWS, if ``may`` allows the entry."""
    return [
        np.where(here & ~np.isin(column, other[there]), _GROWS, column)
        for column, other, here, there in zip(columns, columns[::-1], may, may[::-1], strict=True)
    ]


def _grown(column: np.ndarray, by_two_layers: np.ndarray, layers: int) -> np.ndarray:
    """A column of a model with ``layers`` layers more than the shallow one, if it grows by ``by_two_layers``.

    Raises:
        NotAlike: a number of the column would be no integer.
    """
    grown = column + by_two_layers * ((layers - 2) / 2)
    if (grown != np.rint(grown)).any():
        raise listed.NotAlike("something does not grow by the same with each layer")
    return grown.astype(column.dtype)


class _DeepLog:
    """The memory log of a deeper model."""

    def __init__(self, shallow: MemoryLog, deeper: MemoryLog, grows: bool):
        if shallow.place_names != deeper.place_names:
            raise listed.NotAlike("other modules are called in a deeper model")
        self._log = deeper
        logs = shallow, deeper
        events = [np.asarray(log.events, dtype=np.int64) for log in logs]
        # for each event, the bytes of its storage, and whether its birth is in a phase where bytes may grow
        pairs = [*zip(logs, events, strict=True)]
        sizes = [np.asarray(log.sizes, dtype=np.int64)[np.abs(each) - 1] for log, each in pairs]
        may = [grows & _outside(log.marks, len(each))[each > 0][np.abs(each) - 1] for log, each in pairs]
        alike = _without_what_grows(sizes, may)
        self._list = DeepList(
            *(listed.listed_log(log, each, log.ends) for log, each in zip(logs, alike, strict=True))
        )
        # for each storage of the deeper log, the bytes by which two layers more enlarge it
        self._growth = np.zeros(len(deeper.sizes))
        born = events[1] > 0
        self._growth[events[1][born] - 1] = self._list.growth(*sizes)[born]

    def by(self, layers: int) -> MemoryLog:
        sizes = _grown(np.asarray(self._log.sizes, dtype=np.int64), self._growth, layers)
        return listed.log_in_order(self._log, self._list.by(layers), sizes)


class _DeepProgram:
    """The program of a deeper model."""

    def __init__(self, shallow: Program, deeper: Program, grows: bool):
        self._program = deeper
        columns = listed.columns_of(deeper)
        others = [each.name for each in fields(Program) if each.name not in {*columns, "marks"}]
        if any(getattr(shallow, name) != getattr(deeper, name) for name in others):
            raise listed.NotAlike("a deeper model calls other operators, or communicates in other groups")
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
            lists.append(listed.listed_program(program, **amounts))
        self._list = DeepList(*lists)
        self._growth = {name: self._list.growth(*pair) for name, pair in pairs.items()}

    def by(self, layers: int) -> Program:
        grown = {}
        for name, growth in self._growth.items():
            column = getattr(self._program, name)
            wide = _grown(column.astype(np.float64), growth, layers)
            if name == "host" and (wide > _MOST_HOST_WORK).any():
                raise listed.NotAlike("the host does more between two events than a program can have")
            grown[name] = wide.astype(column.dtype)
        return listed.program_in_order(self._program, self._list.by(layers), **grown)


class _DeepCounts:
    """The counts of communication of a deeper model."""

    def __init__(self, shallow: CommunicationMeter, deeper: CommunicationMeter, grows: bool):
        self._shallow, self._deeper = shallow, deeper
        alike = len(shallow.counts) == len(deeper.counts) and shallow.axes == deeper.axes
        for a, b in zip(shallow.counts, deeper.counts, strict=False):
            may = grows and b.phase not in _OF_LAYERS
            alike = alike and a == (replace(b, payload_bytes=a.payload_bytes) if may else b)
        if not alike:
            raise listed.NotAlike("a deeper model sends other messages")

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
        shallow, deeper: the traces of models of n and n + 2 layers, or repeating units of layers.
        grows: whether buffers and messages that span all layers may grow outside forward and backward.

    Raises:
        NotAlike: the two traces do not determine a deeper model's trace.
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
        """The trace of a model with that many layers more than the shallower model.

        Raises:
            NotAlike: the two traces do not determine that model's trace.
        """
        return replace(
            self._trace,
            memory=self._memory.by(layers),
            host_memory=self._host_memory.by(layers),
            communication=self._counts.by(layers),
            program=None if self._program is None else self._program.by(layers),
        )
