"""What an engine is: something that measures cells.

An engine is found by being there: a class derived from :class:`Engine`, with a name, in a module of this
package or registered by another package under the entry point group ``spbench.engines``. A cell names its
engine; what an engine can do stands on its class, so that nothing else has to know engines by name.

What may be searched for, and the values that a search may try.

A quantity is found by being there: a class derived from :class:`Quantity`, with a name, in a module of this
package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from spbench.impls import Place, Unsupported, named_classes, nesting


class Engine(ABC):
    """Measures cells; see the capabilities below for what it may be asked."""

    #: how cells and the option ``--engine`` name it
    name: ClassVar[str]
    #: one line for `spbench list engines`
    summary: ClassVar[str]
    #: whether its measurements run one at a time with nothing beside them, since it starts processes of its
    #: own or times what it runs; training runs, of which only losses are kept, do not
    runs_alone: ClassVar[bool] = False
    #: whether its memory and times are the same in every run on any machine, so that they can be compared
    #: exactly
    is_exact: ClassVar[bool] = False
    #: whether its tensors are on a device of this machine, of the type that a cell says (``--device``); else
    #: they are on the CPU, whatever they stand for
    on_devices: ClassVar[bool] = False
    #: of the settings of a cell that not every engine can heed, those that it does, of ``rank`` (the one that
    #: it plays alone), ``timing``, ``meters`` and ``training.`` moments, steps, batch_on_device and
    #: alloc_retries; a scenario that gives others is refused
    heeds: ClassVar[frozenset[str]] = frozenset()
    #: whether it ends a cell at :attr:`Cell.timeout_s` itself, since it knows what its processes do by then
    ends_in_time: ClassVar[bool] = False

    def check(self, cell: Cell) -> None:
        """Refuse what the engine cannot be asked, as far as that is known before a cell is planned.

        Raises:
            Unsupported: it does not search, does not train, or has no such setting.
        """
        if cell.search is not None and type(self).probes is Engine.probes:
            self.probes(cell)
        if cell.learning is not None and type(self).learn is Engine.learn:
            self.learn(cell)

    @abstractmethod
    def measure(self, cell: Cell) -> Measurement:
        """Measure a training or inference step.

        Raises:
            Unsupported: the strategy cannot run these sizes, with the reason and the nearest that work.
        """

    def probes(self, cell: Cell) -> AbstractContextManager[Callable[[Cell], Measurement]]:
        """For a search: a function that says of a cell, with the rank to be played, whether its step fits,
        and with which memory.

        Args:
            cell: the one that searches.

        Raises:
            Unsupported: the engine does not search.
        """
        raise Unsupported(f"searches do not run on the engine {self.name}", "use the virtual one")

    def learn(self, cell: Cell) -> Measurement:
        """Train on real data, and return the losses of each step.

        Raises:
            Unsupported: the engine computes no losses, or the strategy cannot run these sizes.
        """
        raise Unsupported(f"the engine {self.name} computes no losses", "use the engine distributed")


def engine_classes() -> dict[str, type[Engine]]:
    """Every engine by name: the engines of this package, then the entry points ``spbench.engines``."""
    return dict(named_classes("spbench.bench.measure.engines", Engine, "spbench.engines"))


def engine_class(name: str) -> type[Engine]:
    """The engine of that name.

    Raises:
        KeyError: no engine has that name; the message lists the names.
    """
    classes = engine_classes()
    if name not in classes:
        raise KeyError(f"unknown engine {name!r}; choices: {', '.join(classes)}")
    return classes[name]


def heeded(engine: str) -> list[str]:
    """The settings that an engine heeds and others do not; see :attr:`Engine.heeds`."""
    return sorted(engine_class(engine).heeds)


def engine_property(engine: str, name: str) -> bool:
    """A property of an engine's class, such as ``on_devices``; see :class:`Engine`."""
    return bool(getattr(engine_class(engine), name))


#: kernels treat tiny shapes apart, so that shorter sequences do not predict longer ones
SHORTEST_SAMPLE = 128


class Quantity:
    """A setting of a cell that can be searched for."""

    #: how searches name it; the field of :class:`Cell`, unless :meth:`at` sets something else
    name: ClassVar[str]
    #: degree of the polynomial in it that the bytes of a tensor are
    degree: ClassVar[int]

    def parts(self, cell: Cell) -> int:
        """The number of equal parts that the value is divided into: values are multiples of it."""
        return 1

    def smallest_sample(self, unit: int) -> int:
        """The smallest value, in units, whose step is enough like large ones to predict them from it."""
        return 1

    def at(self, cell: Cell, value: int) -> Cell:
        """A cell that searches for this quantity, with the quantity set to a value, and no search."""
        return cell.at(value)


class Batch(Quantity):
    """Samples of the whole batch, equally many in each micro-batch of each replica."""

    name = "batch"
    degree = 1

    def parts(self, cell: Cell) -> int:
        return cell.sizes.dp * cell.training.micro_batches


class SequenceLength(Quantity):
    """Positions of a whole sequence, equally many in each chunk that the strategy cuts; attention scores have
    bytes that are quadratic in them."""

    name = "seq_len"
    degree = 2

    def parts(self, cell: Cell) -> int:
        place = Place(cell.mesh_sizes)
        return nesting(cell.strategy).configured(place, cell.strategy_options).length_multiple

    def smallest_sample(self, unit: int) -> int:
        return -(-SHORTEST_SAMPLE // unit)


def quantities() -> Mapping[str, type[Quantity]]:
    """The quantities by name."""
    return named_classes("spbench.bench.measure.engines", Quantity)


class Candidates:
    """The values that a search may try.

    Args:
        cell: with ``search`` set.

    Attributes:
        values: in ascending order.

    Raises:
        Unsupported: the smallest value is above the search's limit, or the strategy cannot run on these
            sizes.
    """

    def __init__(self, cell: Cell):
        assert cell.search is not None
        self.cell, self.asked = cell, cell.search
        self.quantity = quantities()[cell.search.quantity]()
        step = cell.search.step * self.quantity.parts(cell)
        self.values = range(step, cell.search.limit + 1, step)
        if not self.values:
            raise Unsupported(
                f"{self.quantity.name} is searched in steps of {step}, above the limit {cell.search.limit}",
                "raise the limit",
            )

    def at(self, value: int) -> Cell:
        """The cell with the quantity set to a value, and no search."""
        return self.quantity.at(self.cell, value)
