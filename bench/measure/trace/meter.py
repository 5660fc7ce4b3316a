"""What a meter is: something that watches a step through the recorder, and has a say in the result row.

A meter is found by being there: a class derived from :class:`Meter`, with a name, in a module of this
package. A scenario asks for it by name (``meters: [NAME]``); what it found stands in the row under
``measurement.meters.NAME``. Memory and communication are metered in every cell. If several steps
are traced (``training.steps``), meters see the last one, but for the meter of memory, which sees all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from spbench.impls.discovery import named_classes

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Communication:
    """One call of an operator that communicates.

    Attributes:
        collective: a key of :data:`WIRE_SHARE`.
        payload_bytes: of the whole tensor, as :data:`WIRE_SHARE` defines it for the collective.
        group: the ranks that take part.
        returns_new: the operator returns new tensors (functional collectives); else it fills its arguments.
    """

    collective: str
    payload_bytes: int
    group: dist.ProcessGroup
    returns_new: bool = False


class Call(NamedTuple):
    """One call of an operator, after it has returned.

    Attributes:
        func: a ``torch._ops.OpOverload``.
        communication: what it communicates; None where it does not.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    communication: Communication | None = None


class Meter:
    """Watches the operators of one rank's step. The defaults watch nothing.

    Args:
        mesh: the device mesh of the cell, as this rank sees it; None for a rank alone.
    """

    #: how scenarios name it, and the key of what it found in a row
    name: ClassVar[str]
    #: whether every recorder has it, so that no scenario asks for it
    always: ClassVar[bool] = False

    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh

    def phase(self, name: str) -> None:
        """A phase of the step begins: forward, backward, gradient_sync or optimizer."""

    def see(self, call: Call) -> None:
        """An operator has been called. Also called before the first phase, while the model and its inputs are
        made."""

    def found(self) -> Mapping[str, Any]:
        """What goes into the result row: plain data, units in the names."""
        return {}


def meters() -> Mapping[str, type[Meter]]:
    """The meters that a scenario can ask for, by name."""
    classes = named_classes("spbench.bench.measure.trace", Meter)
    return {name: cls for name, cls in classes.items() if not cls.always}


def meter_classes(names: Sequence[str]) -> list[type[Meter]]:
    """The meters of these names.

    Raises:
        KeyError: one is unknown; with the known names.
    """
    classes = meters()
    if missing := [name for name in names if name not in classes]:
        raise KeyError(f"unknown meter {missing[0]!r}; choices: {', '.join(classes) or 'none'}")
    return [classes[name] for name in names]
