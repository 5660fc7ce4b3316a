"""A process group whose tensors go through the host's memory: several ranks may share one GPU.

NCCL wants a GPU for each rank, and Gloo does not send from a GPU. With this backend a machine with one GPU
verifies any number of ranks with the kernels of that GPU. It is slow, so nothing is timed on it.
"""

# torch's stubs and its C++ differ in the names and the arguments that a group written in Python overrides
# mypy: disable-error-code="override, assignment, call-arg"

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

#: how torch.distributed names it
STAGED = "spbench_staged"


class _Staged(dist.Work):
    """A collective in progress on copies of tensors in the host's memory; wait copies the results back."""

    def __init__(self, work: dist.Work, back: Sequence[tuple[Tensor, Tensor]]):
        super().__init__()
        self._work, self._back = work, back

    def wait(self, timeout: timedelta = timedelta()) -> bool:  # immutable
        self._work.wait(timeout)
        for tensor, copy in self._back:
            tensor.copy_(copy)
        self._back = ()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _on_copies(name: str, tensors: int) -> Callable[..., dist.Work]:
    """The method of a group that calls the method ``name`` of Gloo with copies of its first ``tensors``
    arguments, which are tensors or nested lists, and copies the first back."""

    def run(self: Any, filled: Any, *args: Any) -> dist.Work:
        back: list[tuple[Tensor, Tensor]] = []
        copies = [_copied(filled, back), *(_copied(each, []) for each in args[: tensors - 1])]
        return _Staged(getattr(self._gloo, name)(*copies, *args[tensors - 1 :]), back)

    return run


class StagedGroup(dist.ProcessGroup):
    """A process group that runs Gloo on copies of tensors; see :mod:`measure.processes.staged_group`."""

    def __init__(self, place: Any, options: object = None):
        super().__init__(place.group_rank, place.group_size)
        self._name: str = place.group_id
        size = place.group_size
        self._gloo: Any = dist.ProcessGroupGloo(place.store, place.group_rank, size, place.timeout)

    def getBackendName(self) -> str:
        return STAGED

    # torch sets the names only of groups that are written in C++
    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    allreduce, broadcast, recv = (_on_copies(name, 1) for name in ("allreduce", "broadcast", "recv"))
    allgather, reduce_scatter = (_on_copies(name, 2) for name in ("allgather", "reduce_scatter"))
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        _on_copies(name, 2) for name in ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
    )
    # the names in newer releases of torch
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        copies = _copied(tensors, [])
        work = _Staged(self._gloo.send(copies, rank, tag), ())
        work.kept = copies  # type: ignore[attr-defined]  # until it has been sent
        return work

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier(opts)


def _copied(tensors: Any, back: list[tuple[Tensor, Tensor]]) -> Any:
    """Copies in the host's memory, nested like ``tensors``; appends pairs (original, copy) to ``back``."""
    if isinstance(tensors, Tensor):
        copy = tensors.detach().to("cpu", copy=True).contiguous()
        back.append((tensors.detach(), copy))
        return copy
    return [_copied(each, back) for each in tensors]


def register() -> None:
    """Make :data:`STAGED` known to torch.distributed, once."""
    if STAGED not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED, StagedGroup, extended_api=True, devices=["cpu", "cuda"])
