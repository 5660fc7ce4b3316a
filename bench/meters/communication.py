"""The communication meter: each collective and point-to-point operation, by phase, with its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.bench.meters.meter import Call, Communication, Meter
from spbench.bench.meters.torch_internals import OpOverload, group_named, schema_of
from spbench.impls.traffic import wire_bytes


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(t) for t in tensors)


def _argument(index: int) -> Callable[[Sequence[Any]], int]:
    return lambda args: _nbytes(args[index])


#: c10d operator -> (collective, bytes of its payload from the operator's arguments). The payload is
#: the whole tensor of WIRE_SHARE in spbench.impls.collectives.
_OPERATORS: dict[str, tuple[str, Callable[[Sequence[Any]], int]]] = {
    "send": ("send", _argument(0)),
    "recv_": ("recv", _argument(0)),
    "allreduce_": ("all_reduce", _argument(0)),
    "allreduce_coalesced_": ("all_reduce", _argument(0)),
    "broadcast_": ("broadcast", _argument(0)),
    "reduce_": ("reduce", _argument(0)),
    "allgather_": ("all_gather", _argument(0)),
    "_allgather_base_": ("all_gather", _argument(0)),
    "allgather_into_tensor_coalesced_": ("all_gather", _argument(0)),
    "_reduce_scatter_base_": ("reduce_scatter", _argument(1)),
    "reduce_scatter_": ("reduce_scatter", _argument(1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _argument(1)),
    "alltoall_": ("all_to_all", _argument(1)),
    "alltoall_base_": ("all_to_all", _argument(1)),
    "barrier": ("barrier", lambda args: 0),
}

#: functional collectives, which DTensor and torch.compile use -> (collective, bytes of its payload). Their
#: last positional argument is the group, and they return new tensors
_FUNCTIONAL: dict[str, tuple[str, Callable[[Sequence[Any]], int]]] = {
    "all_reduce": ("all_reduce", _argument(0)),
    "all_reduce_": ("all_reduce", _argument(0)),
    "all_reduce_coalesced": ("all_reduce", _argument(0)),
    "all_reduce_coalesced_": ("all_reduce", _argument(0)),
    "broadcast": ("broadcast", _argument(0)),
    "broadcast_": ("broadcast", _argument(0)),
    "all_gather_into_tensor": ("all_gather", lambda args: _nbytes(args[0]) * args[1]),
    "all_gather_into_tensor_out": ("all_gather", lambda args: _nbytes(args[0]) * args[1]),
    "all_gather_into_tensor_coalesced": ("all_gather", lambda args: _nbytes(args[0]) * args[1]),
    "reduce_scatter_tensor": ("reduce_scatter", _argument(0)),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _argument(0)),
    "all_to_all_single": ("all_to_all", _argument(0)),
    "shard_dim_alltoall": ("all_to_all", _argument(0)),
}

#: where operators that communicate live
_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"}
)
#: operators there that send nothing: the wait for a functional collective, and what it returns wrapped for
#: autograd
_SILENT = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})


def communicates(operator: OpOverload) -> bool:
    """Whether an operator communicates, or waits for that."""
    return operator.namespace in _NAMESPACES


def communication_of(operator: OpOverload, args: Sequence[Any]) -> Communication | None:
    """What a call of an operator communicates; None for one that does not.

    Raises:
        NotImplementedError: an operator whose bytes are not known, so that nothing is passed over.
    """
    if not communicates(operator) or schema_of(operator).name in _SILENT:
        return None
    _, name = schema_of(operator).name.split("::")
    if operator.namespace == "c10d" and name in _OPERATORS:
        collective, payload = _OPERATORS[name]
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        return Communication(collective, payload(args), group)
    if operator.namespace in ("_c10d_functional", "_dtensor") and name in _FUNCTIONAL:
        collective, payload = _FUNCTIONAL[name]
        return Communication(collective, payload(args), _group_named(args[-1]), returns_new=True)
    raise NotImplementedError(f"the communication meter does not know operator {schema_of(operator).name!r}")


def _group_named(group: Any) -> dist.ProcessGroup:
    """The group of a functional collective: older releases of torch pass its name."""
    if isinstance(group, str):
        return group_named(group)  # type: ignore[arg-type]  # a NewType of str
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


@dataclass(frozen=True)
class Operation:
    """One kind of operation of a step."""

    phase: str
    collective: str
    axis: str
    group_size: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that a rank sends for one of them, by the ring algorithms."""
        return wire_bytes(self.collective, self.payload_bytes, self.group_size)


class CommunicationMeter(Meter):
    """Counts operations of each kind.

    Args:
        axes: the mesh axis of each process group, by the group's name.
    """

    name = "communication"

    def __init__(self, axes: Mapping[str, str]):
        self.axes = dict(axes)
        self.current_phase = "setup"
        self.counts: Counter[Operation] = Counter()

    def phase(self, name: str) -> None:
        self.current_phase = name

    def see(self, call: Call) -> None:
        communication = call.communication
        if communication is not None:
            axis = self.axes.get(communication.group.group_name, "world")
            size, nbytes = communication.group.size(), communication.payload_bytes
            self.counts[Operation(self.current_phase, communication.collective, axis, size, nbytes)] += 1

    def sent_bytes(self) -> dict[tuple[str, str], Fraction]:
        """Bytes that one rank sent (mean over its group), by phase and collective."""
        sent: dict[tuple[str, str], Fraction] = {}
        for (phase, collective, _), nbytes in self.sent_bytes_by_axis().items():
            sent[phase, collective] = sent.get((phase, collective), Fraction(0)) + nbytes
        return sent

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
    """A whole number of bytes as int; else (a mean over ranks) as float."""
    return value.numerator if value.denominator == 1 else float(value)
