"""What an engine is: something that measures cells.

An engine is found by being there: a class derived from :class:`Engine`, with a name, in a module of this
package or registered by another package under the entry point group ``spbench.engines``. A cell names its
engine; what an engine can do stands on its class, so that nothing else has to know engines by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from spbench.impls.discovery import named_classes
from spbench.impls.layout import Unsupported


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


def engines() -> dict[str, type[Engine]]:
    """Every engine by name: those of this package, then the entry points ``spbench.engines``."""
    return dict(named_classes("spbench.bench.measure.engines", Engine, "spbench.engines"))


def engine_class(name: str) -> type[Engine]:
    """The engine of that name.

    Raises:
        KeyError: there is none; with the known names.
    """
    known = engines()
    if name not in known:
        raise KeyError(f"unknown engine {name!r}; known: {', '.join(known)}")
    return known[name]


def heeded(engine: str) -> list[str]:
    """The settings that an engine heeds and others do not; see :attr:`Engine.heeds`."""
    return sorted(engine_class(engine).heeds)


def engine_property(engine: str, name: str) -> bool:
    """What the class of an engine says of it, as ``on_devices``; see :class:`Engine`."""
    return bool(getattr(engine_class(engine), name))
