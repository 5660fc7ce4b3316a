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

from spbench.impls.collectives import wire_bytes


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

#: operators whose first argument is filled from other ranks and was made for that
FILLED_FROM_OTHERS = (
    "recv_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
)


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


class CommunicationMeter:
    """Counts operations of each kind.

    Args:
        axes: the mesh axis of each process group, by the group's name.
    """

    def __init__(self, axes: Mapping[str, str]):
        self.axes = dict(axes)
        self.phase = "setup"
        self.counts: Counter[Operation] = Counter()

    def see(self, operator: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[str, int, dist.ProcessGroup]:
        """Note a call of an operator that communicates; returns its collective, payload bytes and group.

        Raises:
            NotImplementedError: an operator whose bytes are not known; nothing is passed over.
        """
        namespace, name = operator._schema.name.split("::")
        if namespace != "c10d" or name not in _OPERATORS:
            raise NotImplementedError(
                f"the communication meter does not know operator {operator._schema.name!r}"
            )
        collective, payload = _OPERATORS[name]
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        axis = self.axes.get(group.group_name, "world")
        nbytes = payload(args)
        self.counts[Operation(self.phase, collective, axis, group.size(), nbytes)] += 1
        return collective, nbytes, group

    def sent_bytes(self) -> dict[tuple[str, str], Fraction]:
        """Bytes that one rank sent (mean over its group), by phase and collective."""
        sent: dict[tuple[str, str], Fraction] = {}
        for operation, count in self.counts.items():
            if operation.sent_bytes:
                key = operation.phase, operation.collective
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
