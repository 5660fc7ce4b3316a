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

    def _on_copies(self, run: Callable[..., Any], filled: Any, *given: Any) -> dist.Work:
        """Call ``run`` with copies of tensors, or of nested lists; copies of ``filled`` are copied back."""
        back: list[tuple[Tensor, Tensor]] = []
        into = _copied(filled, back)
        return _Staged(run(into, *(_copied(each, []) for each in given)), back)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._on_copies(lambda x: self._gloo.allreduce(x, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._on_copies(lambda x: self._gloo.broadcast(x, opts), tensors)

    def allgather(self, out: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> dist.Work:
        return self._on_copies(lambda o, i: self._gloo.allgather(o, i, opts), out, given)

    def _allgather_base(self, out: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self._on_copies(lambda o, i: self._gloo._allgather_base(o, i, opts), out, given)

    def reduce_scatter(self, out: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self._on_copies(lambda o, i: self._gloo.reduce_scatter(o, i, opts), out, given)

    def _reduce_scatter_base(self, out: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self._on_copies(lambda o, i: self._gloo._reduce_scatter_base(o, i, opts), out, given)

    def alltoall_base(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        sizes = out_sizes, given_sizes
        return self._on_copies(lambda o, i: self._gloo.alltoall_base(o, i, *sizes, opts), out, given)

    # the names in newer releases of torch
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        copies = _copied(tensors, [])
        work = _Staged(self._gloo.send(copies, rank, tag), ())
        work.kept = copies  # type: ignore[attr-defined]  # until it has been sent
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._on_copies(lambda x: self._gloo.recv(x, rank, tag), tensors)

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
