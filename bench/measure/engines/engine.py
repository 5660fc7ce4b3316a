"""Engines, which measure cells, and the quantities that a search can vary.

spbench finds an engine by its class: a class derived from :class:`Engine`, with a name, in a module of this
package, or registered by another package under the entry point group ``spbench.engines``. A cell names its
engine. The attributes of the class say what the engine can do, so that no other code lists engines by name.

spbench finds a quantity in the same way: a class derived from :class:`Quantity`, with a name, in a module of
this package.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import VARIABLES
from spbench.impls import Place, Unsupported, named_classes, nesting


class Engine(ABC):
    """Measures cells. The class attributes below say which cells an engine accepts."""

    #: the engine's name in cells and in the option ``--engine``
    name: ClassVar[str]
    #: one line for `spbench list engines`
    summary: ClassVar[str]
    #: whether measurements must run one at a time, with no other work on the machine, since the engine starts
    #: processes or times real work; training runs, of which only losses are kept, may run side by side
    runs_alone: ClassVar[bool] = False
    #: whether memory and times are equal in every run on any machine, so that they can be compared exactly
    is_exact: ClassVar[bool] = False
    #: whether it runs training steps of users' own programs
    runs_steps: ClassVar[bool] = False
    #: whether tensors are on a device of this machine, of the type that a cell says (``--device``); if not,
    #: all tensors are on the CPU
    on_devices: ClassVar[bool] = False
    #: the settings of a cell that this engine heeds, among the settings that some engines ignore: ``rank``
    #: (the only rank that an engine plays), ``timing``, ``meters``, ``training.moments``, ``training.steps``,
    #: ``training.batch_on_device`` and ``training.alloc_retries``; a scenario with a setting that the
    #: engine ignores is refused
    heeds: ClassVar[frozenset[str]] = frozenset()
    #: whether tensors are real, so that the engine's processes read :data:`VARIABLES` from their environment
    real_tensors: ClassVar[bool] = False
    #: whether the engine itself stops a cell at :attr:`Cell.timeout_s`, and reports what its processes did
    ends_in_time: ClassVar[bool] = False

    def check(self, cell: Cell) -> None:
        """Refuse a cell that the engine cannot run, as far as that is known before the cell is planned.

        Raises:
            Unsupported: the engine does not search, does not train, or ignores a setting of the cell.
        """
        for name, variable in VARIABLES.items() if self.real_tensors else ():
            if getattr(cell.training, name) is not None:
                raise Unsupported(
                    f"the engine {cell.engine} does not set training.{name}",
                    f"leave it out, and set {variable} in the environment",
                )
        if cell.search is not None and type(self).probes is Engine.probes:
            self.probes(cell)
        if cell.learning is not None and type(self).learn is Engine.learn:
            self.learn(cell)

    @abstractmethod
    def measure(self, cell: Cell) -> Measurement:
        """Measure a training or inference step.

        Raises:
            Unsupported: the strategy cannot run these sizes; says why, and the nearest sizes that work.
        """

    def probes(self, cell: Cell) -> AbstractContextManager[Callable[[Cell], Measurement]]:
        """Yields a function for a search: for a cell, with the rank to be played, the function returns a
        measurement of memory whose status says whether the step fits.

        Args:
            cell: the cell whose ``search`` is to be answered.

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
    """The class of the engine with that name.

    Raises:
        KeyError: no engine has that name; the message lists the names of all engines.
    """
    classes = engine_classes()
    if name not in classes:
        raise KeyError(f"unknown engine {name!r}; choices: {', '.join(classes)}")
    return classes[name]


#: positions: kernels treat shorter sequences specially, so that those do not predict longer sequences
SHORTEST_SAMPLE = 128


class Quantity:
    """A setting of a cell that can be searched for."""

    #: the name in searches, and the field of :class:`Cell`, unless :meth:`at` sets another field
    name: ClassVar[str]
    #: the bytes of a tensor are a polynomial of this degree in the quantity
    degree: ClassVar[int]

    def parts(self, cell: Cell) -> int:
        """The number of equal parts that each value is divided into; values are its multiples."""
        return 1

    def smallest_sample(self, unit: int) -> int:
        """The smallest value, in units of ``unit``, whose step predicts the steps of larger values."""
        return 1

    def at(self, cell: Cell, value: int) -> Cell:
        """A copy of a searching cell with this quantity set to ``value``, and without the search."""
        return cell.at(value)


class Batch(Quantity):
    """The number of samples in the whole batch: equally many in each micro-batch of each replica."""

    name = "batch"
    degree = 1

    def parts(self, cell: Cell) -> int:
        return cell.sizes.dp * cell.training.micro_batches


class SequenceLength(Quantity):
    """The number of positions in a whole sequence: equally many in each chunk that the strategy cuts. The
    bytes of attention scores are quadratic in the sequence length."""

    name = "seq_len"
    degree = 2

    def parts(self, cell: Cell) -> int:
        place = Place(cell.mesh_sizes)
        return nesting(cell.strategy).configured(place, cell.strategy_options).length_multiple

    def smallest_sample(self, unit: int) -> int:
        return -(-SHORTEST_SAMPLE // unit)


def quantities() -> Mapping[str, type[Quantity]]:
    """The classes of the quantities that a search can vary, by name."""
    return named_classes("spbench.bench.measure.engines", Quantity)


class Candidates:
    """The values that a search may try.

    Args:
        cell: a cell with ``search`` set.

    Attributes:
        values: the values, in ascending order.

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
        """A copy of the cell with the searched quantity set to ``value``, and without the search."""
        return self.quantity.at(self.cell, value)
