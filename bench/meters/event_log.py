"""The event log: a rank's operators and communication in order, with all that their time depends on.

It times nothing. :mod:`bench.simulator.simulate` turns what it wrote down into seconds on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import flop_registry

from spbench.bench.meters.meter import Call, Communication, Meter
from spbench.bench.meters.streams import Streams
from spbench.bench.simulator.program import (
    ATTENTION,
    KERNEL,
    MATRIX_PRODUCT,
    MEMORY_BOUND,
    NO_SHAPE,
    PRECISION_NAMES,
    Group,
    Program,
    ProgramBuilder,
    offset,
)
from spbench.impls.kernels.flash_attention import backward_flops, forward_flops

_PRECISION = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_OTHER = len(PRECISION_NAMES) - 1

#: matrix products -> position of their first operand; the second follows it
_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "addmm_": 1,
    "baddbmm_": 1,
    "te_mm": 0,
    "te_accumulate_mm_": 1,
    "accumulate_mm_": 1,
    "strided_bmm": 0,
}
#: operators that move no data, beside views: they make room, or pass a tensor on
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "_unsafe_view", "lift_fresh", "detach", "detach_", "alias", "resize_", "set_", "_local_scalar_dense",
}  # fmt: skip
#: operators that write their first argument and do not read it
_OVERWRITING = {
    "copy_", "_foreach_copy_", "zero_", "fill_",
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
}  # fmt: skip
#: operators that copy the tensors of their first argument into a part of the second, which they return: they
#: read and write the bytes of the first
_COPIES_INTO = {"all_gather_copy_in"}
#: operators that read only the rows that an index names: they move what they return, twice, and the index
_LOOKUPS = {"embedding", "gather", "index_select"}


_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
_aten = torch.ops.aten


def _whole_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    return forward_flops(q.shape, k.shape, v.shape, causal)


def _whole_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    **_: Any,
) -> int:
    return backward_flops(q.shape, k.shape, v.shape, causal)


#: FLOPs of attention over whole sequences. Traces are made on fake CPU tensors, whose attention kernels
#: torch's counter does not know; and of a causal mask it counts what lies above the diagonal, which no flash
#: attention computes
_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _whole_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _whole_backward,
}


class _Recipe:
    """How to price one operator, worked out once from its schema.

    Attributes:
        free: it costs nothing.
        weights: times that each positional argument's bytes are moved; keyword arguments likewise.
        returned: times that the bytes of the results are moved (0: they are arguments).
    """

    def __init__(self, func: Any, builder: ProgramBuilder):
        schema = func._schema
        self.name = schema.name.split("::")[1]
        self.label = builder.named(self.name)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        aliases = [r.alias_info for r in schema.returns]
        is_view = any(a is not None and not a.is_write for a in aliases)
        makes = any(
            a is None and "Tensor" in str(r.type) for a, r in zip(aliases, schema.returns, strict=True)
        )
        self.free = self.name in _FREE or is_view or not (writes or makes)
        self.returned = 1 if makes else 0
        positional: list[int] = []
        self.keywords: dict[str, int] = {}
        for argument in schema.arguments:
            info = argument.alias_info
            weight = 1
            if (
                info is not None
                and info.is_write
                and self.name not in _OVERWRITING
                and argument.name != "out"
            ):
                weight = 2  # read and written
            if argument.kwarg_only:
                self.keywords[argument.name] = weight
            else:
                positional.append(weight)
        if self.name in _LOOKUPS:
            positional[0], self.returned = 0, 2
        elif self.name in _COPIES_INTO:
            positional[:2], self.returned = [2, 0], 0
        elif self.name == "scatter_add_":
            # self [..., V] is touched only where the index points: read, add, write
            positional[0], positional[3] = 0, 3
        self.weights = tuple(positional)
        self.product = _PRODUCTS.get(self.name, -1)
        formula = _ATTENTION_FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        self.formula = None if self.product >= 0 else formula
        self.category = ATTENTION if "softmax" in self.name or "attention" in self.name else MEMORY_BOUND


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(_nbytes(item) for item in value)
    return 0


def _strided_elements(x: Tensor) -> int:
    """Elements of a matrix [..., r, c] whose rows (or columns) do not follow each other without a gap."""
    *_, r, c = x.shape
    *_, row, column = x.stride()
    dense = (column == 1 and row == c) or (row == 1 and column == r) or r == 1 or c == 1
    return 0 if dense else x.numel()


class PostedWork(dist.Work):
    """Stands for a communication that has been posted; says when it is waited for.

    Args:
        waited: called with ``event`` at each wait.
        event: the index of the communication in the program; -1: it is not in it.
    """

    def __init__(self, waited: Callable[[int], None], event: int):
        super().__init__()
        self._waited, self.event = waited, event

    def wait(self, timeout: Any = None) -> bool:
        self._waited(self.event)
        return True

    def is_completed(self) -> bool:
        return True


class EventLog(Meter):
    """Writes down the program of the rank it watches, from the first phase on.

    Args:
        mesh: the device mesh.
    """

    name = "event_log"

    def __init__(self, mesh: DeviceMesh | None):
        if mesh is None:
            raise ValueError("events are noted relative to a device mesh, and there is none")
        super().__init__(mesh)
        self.rank = mesh.get_rank()
        self.builder = ProgramBuilder(mesh.shape)
        #: on which operators are issued, see :func:`recorded_streams`
        self.streams = Streams(self.builder)
        self._recipes: dict[Any, _Recipe] = {}
        self._groups: dict[str, tuple[list[int], Group]] = {}
        #: how far away each peer is along the axes of the mesh, by its global rank
        self._offsets: dict[int, tuple[int, ...]] = {}
        # C++ holds only the C++ half of a Work: without this its wait would find no Python to call
        self._works: list[PostedWork] = []
        #: the event of each functional collective that has not been waited for, by its result's storage
        self._functional: dict[int, int] = {}
        self.running = False

    def phase(self, name: str) -> None:
        self.running = self.streams.open = True
        self.builder.phase(name)

    def program(self) -> Program:
        """What was seen so far; what was posted is forgotten, so that nothing keeps the meter alive."""
        self._works.clear()
        self.streams.close()
        return self.builder.program()

    def renumber_posts(self, first: int, by: int) -> None:
        """Note that what was posted as event ``first`` or later now has a number larger by ``by``."""
        for work in reversed(self._works):  # in the order of their events
            if work.event < first:
                break
            work.event += by
        for storage, event in self._functional.items():
            if event >= first:
                self._functional[storage] = event + by

    def see(self, call: Call) -> None:
        if not self.running or call.communication is not None:
            return
        func, args, kwargs, result, _ = call
        if func is _WAIT_TENSOR:
            self._waited(self._functional.pop(args[0].untyped_storage()._cdata, -1))
            return
        recipe = self._recipes.get(func)
        if recipe is None:
            recipe = self._recipes[func] = _Recipe(func, self.builder)
        if recipe.free:
            return
        nbytes = 0
        precision = _OTHER
        for value, weight in zip(args, recipe.weights, strict=False):
            if isinstance(value, Tensor):
                nbytes += value.nbytes * weight
                if precision == _OTHER:
                    precision = _PRECISION.get(value.dtype, _OTHER)
            elif isinstance(value, (tuple, list)):
                nbytes += _nbytes(value) * weight
        if kwargs:
            for name, value in kwargs.items():
                nbytes += _nbytes(value) * recipe.keywords.get(name, 1)
        if recipe.returned:
            nbytes += _nbytes(result) * recipe.returned
        flops, shape, strided, category = 0, NO_SHAPE, 0, recipe.category
        if recipe.product >= 0:
            a, b = args[recipe.product], args[recipe.product + 1]
            *_, m, k = a.shape
            n = b.shape[-1]
            batch = prod(a.shape[:-2])
            flops, shape, category = 2 * batch * m * n * k, (batch, m, n, k), MATRIX_PRODUCT
            made = result if isinstance(result, Tensor) else args[0]  # added to in place
            strided = _strided_elements(a) + _strided_elements(b) + _strided_elements(made)
            precision = _PRECISION.get(a.dtype, _OTHER)
        elif recipe.formula is not None:
            flops = recipe.formula(*args, **(kwargs or {}), out_val=result)
        self.builder.rows.append(
            (KERNEL, recipe.label, category, nbytes, flops, precision, shape, strided, -1)
        )

    def post(self, args: Sequence[Any], result: Any, communication: Communication) -> Any:
        """Note a call that communicates; returns the operator's result with a Work that is watched."""
        event = self._event(args, communication) if self.running else -1
        if communication.returns_new:
            for x in [result] if isinstance(result, Tensor) else result:
                self._functional[x.untyped_storage()._cdata] = event
            return result
        work = PostedWork(self._waited, event)
        self._works.append(work)
        boxed = work.boxed()
        if isinstance(result, (tuple, list)):
            return (*result[:-1], boxed)
        return boxed

    def _event(self, args: Sequence[Any], communication: Communication) -> int:
        ranks, group = self._group(communication.group)
        if communication.collective in ("send", "recv"):
            peer = ranks[args[2]]
            by = self._offsets.get(peer)
            if by is None:
                by = self._offsets[peer] = offset(self.rank, peer, self.builder.mesh)
            post = self.builder.send if communication.collective == "send" else self.builder.recv
            return post(communication.payload_bytes, by)
        return self.builder.collective(communication.collective, communication.payload_bytes, group)

    def _waited(self, event: int) -> None:
        if event >= 0:
            self.builder.wait(event)

    def _group(self, group: dist.ProcessGroup) -> tuple[list[int], Group]:
        known = self._groups.get(group.group_name)
        if known is None:
            ranks = dist.get_process_group_ranks(group)
            known = self._groups[group.group_name] = ranks, Group.of(ranks, self.builder.mesh)
        return known
