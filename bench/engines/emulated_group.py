"""A process group of which one rank exists: what the others would send is made up, and nobody waits.

Every buffer that a real rank would receive into is written, in place, so that no value of a step depends on
what was in memory before: gathered and exchanged tensors get this rank's own part in the place of each
other's, and what arrives from one other rank is drawn from a narrow normal distribution. A sum is left as it
is. So contents are finite and of the size of activations, and nothing is allocated. On a GPU the writes take
of the memory's bandwidth as those of NCCL's kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.engines.virtual import fake_mesh

BACKEND = "emulated"
DEVICES = ("cpu", "cuda")
#: of what arrives from one other rank: like weights times normalised activations, small enough for float16
_DEVIATION = 0.1


class EmulatedGroup(dist.ProcessGroup):
    """The group as its one real rank sees it.

    Each method lets torch's operator run on a group that does nothing, so that meters see it, and then writes
    what it received, which they do not see.
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        nothing = FakeProcessGroup._create_internal(rank, size)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in DEVICES:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, nothing)

    def recv(self, tensors: list[Tensor], *rest: Any) -> dist.Work:
        work = super().recv(tensors, *rest)
        _draw(tensors)
        return work

    def all_gather_single(self, output: Tensor, part: Tensor, *rest: Any) -> dist.Work:
        work = super().all_gather_single(output, part, *rest)
        self._gather(output, part)
        return work

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], parts: list[Tensor], *rest: Any
    ) -> dist.Work:
        work = super().all_gather_single_coalesced(outputs, parts, *rest)
        for output, part in zip(outputs, parts, strict=True):
            self._gather(output, part)
        return work

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], *rest: Any) -> dist.Work:
        work = super().allgather(outputs, parts, *rest)
        for received, part in zip(outputs, parts, strict=True):
            for output in received:
                _copy(output, part)
        return work

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, *rest: Any) -> dist.Work:
        work = super().reduce_scatter_single(output, whole, *rest)
        _copy(output.view(-1), whole.view(self.size(), -1)[self.rank()])
        return work

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], *rest: Any
    ) -> dist.Work:
        work = super().reduce_scatter_single_coalesced(outputs, wholes, *rest)
        for output, whole in zip(outputs, wholes, strict=True):
            _copy(output.view(-1), whole.view(self.size(), -1)[self.rank()])
        return work

    def reduce_scatter(self, outputs: list[Tensor], wholes: list[list[Tensor]], *rest: Any) -> dist.Work:
        work = super().reduce_scatter(outputs, wholes, *rest)
        for output, parts in zip(outputs, wholes, strict=True):
            _copy(output, parts[self.rank()])
        return work

    def all_to_all_single(self, output: Tensor, sent: Tensor, *rest: Any) -> dist.Work:
        work = super().all_to_all_single(output, sent, *rest)
        self._exchange([output], [sent])
        return work

    def alltoall(self, outputs: list[Tensor], sent: list[Tensor], *rest: Any) -> dist.Work:
        work = super().alltoall(outputs, sent, *rest)
        self._exchange(outputs, sent)
        return work

    def _exchange(self, outputs: list[Tensor], sent: list[Tensor]) -> None:
        for output, own in zip(outputs, sent, strict=True):
            if output.shape == own.shape:
                _copy(output, own)
            else:  # parts of uneven sizes
                _draw([output])

    def _gather(self, output: Tensor, part: Tensor) -> None:
        whole, rank, own = output.view(self.size(), -1), self.rank(), part.view(1, -1)
        # apart, as the part may lie in its place in the whole
        for rows in (whole[:rank], whole[rank : rank + 1], whole[rank + 1 :]):
            _copy(rows, own)


def _copy(output: Tensor, own: Tensor) -> None:
    with torch._C._DisableTorchDispatch():
        output.detach().copy_(own.detach())


def _draw(tensors: Iterable[Tensor]) -> None:
    with torch._C._DisableTorchDispatch():
        for x in tensors:
            if x.is_floating_point():
                x.detach().normal_(std=_DEVIATION)
            else:
                x.zero_()


def _create(options: Any, backend_options: Any) -> EmulatedGroup:
    return EmulatedGroup(options.group_rank, options.group_size)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[*DEVICES])


def emulated_mesh(
    sizes: Mapping[str, int], rank: int, device: str = "cpu"
) -> AbstractContextManager[DeviceMesh]:
    """As :func:`fake_mesh`, of groups whose communication leaves finite values."""
    return fake_mesh(sizes, rank, device, BACKEND)
