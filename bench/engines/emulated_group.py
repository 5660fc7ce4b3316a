"""A process group of which one rank exists: what the others would send is made up, and nobody waits.

torch's fake group leaves sums as they are and, in gathered, scattered and exchanged tensors, puts this rank's
own part in the place of each other's. It leaves alone what arrives from one other rank, and what an exchange
of uneven parts has no counterpart for: these are drawn here from a narrow normal distribution, in place. So
no value of a step depends on what was in memory before, all are finite and of the size of activations, and
nothing is allocated. On a GPU the writes take of the memory's bandwidth as those of NCCL's kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.engines.virtual import fake_mesh
from spbench.bench.meters.torch_internals import FakeProcessGroup, without_dispatch

BACKEND = "emulated"
DEVICES = ("cpu", "cuda")
#: of what is drawn: like a product of weights and normalised activations, and small enough for float16
_DEVIATION = 0.1


class EmulatedGroup(dist.ProcessGroup):
    """The group as its one real rank sees it.

    Each method lets torch's operator run on the fake group, so that meters see it, and then writes what it
    received, which they do not see.
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form for groups written in Python
        fake = FakeProcessGroup._create_internal(rank, size)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in DEVICES:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)

    def recv(self, tensors: list[Tensor], *rest: Any) -> dist.Work:
        work = super().recv(tensors, *rest)
        _draw(tensors)
        return work

    def all_to_all_single(self, output: Tensor, sent: Tensor, *rest: Any) -> dist.Work:
        work = super().all_to_all_single(output, sent, *rest)
        if output.shape != sent.shape:
            _draw([output])
        return work


def _draw(tensors: Iterable[Tensor]) -> None:
    with without_dispatch():
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
