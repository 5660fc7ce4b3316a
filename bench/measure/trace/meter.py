"""Meters, which watch the operators of a step through the recorder and add to the result row; and the
communication meter, which counts each collective and point-to-point operation, by phase, with its bytes.

spbench finds a meter by its class: a class derived from :class:`Meter`, with a name, in a module of this
package. A scenario asks for a meter by name (``meters: [NAME]``), and the meter's results are in the row
under ``measurement.meters.NAME``. Memory and communication are metered in every cell. If several steps are
traced (``training.steps``), meters see only the last step, but memory meters see all steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace.operator_prices import OPERATORS, CallFigures, nbytes_of
from spbench.bench.measure.trace.torch_internals import OpOverload, group_named, schema_of
from spbench.impls import MESH_AXES, named_classes, wire_bytes


@dataclass(frozen=True)
class Communication:
    """One call of an operator that communicates.

    Attributes:
        collective: a key of :data:`WIRE_SHARE`.
        payload_bytes: bytes of the whole tensor, as :data:`WIRE_SHARE` defines it for the collective.
        group: the ranks that take part.
        returns_new: whether the operator returns new tensors (functional collectives) or fills its arguments.
    """

    collective: str
    payload_bytes: int
    group: dist.ProcessGroup
    returns_new: bool = False


#: where an argument stands in a call, or an item of an argument that is a list
Path = tuple[int | str, ...]


@dataclass(frozen=True)
class Made:
    """The metadata of a tensor that an operator makes. ``view_of``: the argument in whose storage the tensor
    lies from element ``offset`` on; None: the tensor has a storage of its own, contents unknown."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    view_of: Path | None = None
    offset: int = 0


@dataclass(frozen=True)
class OperatorArgument:
    """A result that is one of the arguments (of in-place operators, and ``out=``)."""

    path: Path


@dataclass(eq=False)
class Remembered:
    """The description of the results of equal calls of an operator.

    Attributes:
        results: the results, in order; None: the operator returned None.
        container: type of the returned tuple or list; None for a single tensor.
        price: what the event log has worked out for the first of the calls; None: nothing so far.
    """

    results: tuple[Made | OperatorArgument, ...] | None
    container: type | None
    price: CallFigures | None = None

    def __post_init__(self) -> None:
        #: whether any result has a storage of its own
        self.makes_storage = any(
            isinstance(made, Made) and made.view_of is None for made in self.results or ()
        )


class Call(NamedTuple):
    """One call of an operator, after it has returned.

    Attributes:
        func: a ``torch._ops.OpOverload``.
        communication: the communication of the call; None for a call that does not communicate.
        remembered: from which the recorder has built the result; None: the operator has run.
        on_host: whether the host's cores compute the result, in the host's memory.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    communication: Communication | None = None
    remembered: Remembered | None = None
    on_host: bool = False


class Meter:
    """Watches the operators of one rank's step. The defaults watch nothing.

    Args:
        mesh: the device mesh of the cell, as this rank sees it; None for a rank alone.
    """

    #: the meter's name in scenarios, and the key of its results in a row
    name: ClassVar[str]
    #: whether every recorder has the meter, so that no scenario asks for it
    always: ClassVar[bool] = False

    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh

    def phase(self, name: str) -> None:
        """Called when a phase of the step begins: forward, backward, gradient_sync or optimizer."""

    def see(self, call: Call) -> None:
        """Called after each call of an operator, also before the first phase, while the model and its inputs
        are made."""

    def found(self) -> Mapping[str, Any]:
        """The meter's results for the result row: plain data by name, with units in the names."""
        return {}


def meters() -> Mapping[str, type[Meter]]:
    """The meters that a scenario can ask for, by name."""
    classes = named_classes("spbench.bench.measure.trace", Meter)
    return {name: cls for name, cls in classes.items() if not cls.always}


def meter_classes(names: Sequence[str]) -> list[type[Meter]]:
    """The classes of the meters with these names.

    Raises:
        KeyError: a name is unknown; the message lists the names that exist.
    """
    classes = meters()
    if missing := [name for name in names if name not in classes]:
        raise KeyError(f"unknown meter {missing[0]!r}; choices: {', '.join(classes) or 'none'}")
    return [classes[name] for name in names]


_GIVEN_PARTS = OPERATORS["given_parts"]
#: operator, with its namespace -> collective
_COLLECTIVES = {
    f"{namespace}::{operator}": collective
    for namespace, table in OPERATORS["collectives"].items()
    for collective, operators in table.items()
    for operator in operators
}
_NAMESPACES, _SILENT = (frozenset(OPERATORS[kind]) for kind in ("namespaces", "silent"))
#: operators of these namespaces whose bytes are known, with their namespace
METERED = _SILENT.union(_COLLECTIVES)


@cache
def communicates(operator: OpOverload) -> bool:
    """Whether an operator communicates, or waits for communication."""
    return operator.namespace in _NAMESPACES


def communication_of(operator: OpOverload, args: Sequence[Any]) -> Communication | None:
    """The communication of an operator's call; None for a call that does not communicate.

    Raises:
        NotImplementedError: the bytes of a communicating operator are not known, so they cannot be counted.
    """
    if not communicates(operator) or (name := schema_of(operator).name) in _SILENT:
        return None
    if (collective := _COLLECTIVES.get(name)) is None:
        raise NotImplementedError(f"the communication meter does not know operator {name!r}")
    if operator.namespace == "c10d":
        nbytes = 0 if collective == "barrier" else nbytes_of(args[collective in _GIVEN_PARTS])
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        return Communication(collective, nbytes, group)
    nbytes = nbytes_of(args[0]) * (args[1] if collective == "all_gather" else 1)
    return Communication(collective, nbytes, _group_named(args[-1]), returns_new=True)


def _group_named(group: Any) -> dist.ProcessGroup:
    """The process group of a functional collective; ``group`` is its name in older releases of torch."""
    if isinstance(group, str):
        return group_named(group)  # type: ignore[arg-type]  # a NewType of str
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


@dataclass(frozen=True)
class Operation:
    """A kind of communication in a step: operations of one kind have equal bytes in equal groups."""

    phase: str
    collective: str
    axis: str
    group_size: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> Fraction:
        """The bytes that a rank sends for one operation of this kind, by the ring algorithms."""
        return wire_bytes(self.collective, self.payload_bytes, self.group_size)


def group_axes(mesh: DeviceMesh | None) -> dict[str, str]:
    """The mesh axis of each process group of more than one rank, by the group's name."""
    if mesh is None:
        return {}
    groups = {axis: mesh.get_group(axis) for axis in MESH_AXES}
    return {group.group_name: axis for axis, group in groups.items() if group.size() > 1}


class CommunicationMeter(Meter):
    """Counts the communication of a step, by kind of operation.

    Args:
        axes: the mesh axis of each process group, by the group's name.
    """

    name = "communication"
    always = True

    def __init__(self, axes: Mapping[str, str]):
        self.axes = dict(axes)
        self.current_phase = "setup"
        self.counts: Counter[Operation] = Counter()
        #: the operations, in order
        self.calls: list[Operation] = []

    def with_counts(self, counts: Mapping[Operation, int]) -> Self:
        """A meter of the same process groups with other counts."""
        other = type(self)(self.axes)
        other.current_phase = self.current_phase
        other.counts.update(counts)
        return other

    def phase(self, name: str) -> None:
        self.current_phase = name

    def see(self, call: Call) -> None:
        communication = call.communication
        if communication is not None:
            axis = self.axes.get(communication.group.group_name, "world")
            size, nbytes = communication.group.size(), communication.payload_bytes
            operation = Operation(self.current_phase, communication.collective, axis, size, nbytes)
            self.counts[operation] += 1
            self.calls.append(operation)

    def sent_bytes_by_axis(self) -> dict[tuple[str, str, str], Fraction]:
        """Bytes that one rank sent (mean over its group), by phase, collective and axis."""
        sent: dict[tuple[str, str, str], Fraction] = {}
        for operation, count in self.counts.items():
            if operation.sent_bytes:
                key = operation.phase, operation.collective, operation.axis
                sent[key] = sent.get(key, Fraction(0)) + count * operation.sent_bytes
        return sent

    def rows(self) -> list[dict[str, Any]]:
        """One row for each phase, collective and axis: count, payload and sent bytes of one rank."""
        totals: dict[tuple[str, str, str, int], list[Any]] = {}
        for operation, count in self.counts.items():
            key = (operation.phase, operation.collective, operation.axis, operation.group_size)
            total = totals.setdefault(key, [0, 0, Fraction(0)])
            total[0] += count
            total[1] += count * operation.payload_bytes
            total[2] += count * operation.sent_bytes
        return [
            {
                "phase": phase,
                "collective": collective,
                "axis": axis,
                "group_size": size,
                "count": count,
                "payload_bytes": payload,
                "sent_bytes": as_number(sent),
            }
            for (phase, collective, axis, size), (count, payload, sent) in sorted(totals.items())
        ]


def as_number(value: Fraction) -> int | float:
    """A number of bytes: an int if it is whole, else (a mean over ranks) a float."""
    return value.numerator if value.denominator == 1 else float(value)
