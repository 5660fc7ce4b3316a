"""Weights on the meta device, with shapes and without memory, until a backend has divided them among ranks.

Programs whose model is larger than a card do the same: torchtitan shards the model on the meta device, then
gives each rank memory for its part only (``to_empty``) and draws the parts' values in place; DeepSpeed's
``zero.Init`` divides each module as it is built.

This module also cuts only those pieces of a parameter that torch's ``fully_shard`` reads. ``fully_shard``
cuts each parameter into one piece for each rank, twice, and uses only the first piece and the rank's own; on
1,024 fake ranks these cuts are most of a step's set-up.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from spbench.impls.backends.backend import HeldPart

#: the function of torch.distributed.fsdp._fully_shard._fsdp_param that cuts a tensor into a list of
#: ``num_chunks`` pieces, the last of them empty where ``torch.chunk`` gives fewer
CUT = "_chunk_with_empty"


class Pieces:
    """The pieces of a tensor along a dim, each cut on access.

    Args:
        num_chunks: number of pieces; pieces beyond the tensor's end are empty and have one dim.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._each = math.ceil(tensor.shape[dim] / num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        start, end = number * self._each, self._tensor.shape[self._dim]
        if start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._each, end - start))


@contextmanager
def cut_when_asked() -> Iterator[None]:
    """A context in which ``fully_shard`` cuts only the pieces that it reads. With a torch that names
    :data:`CUT` differently it cuts all pieces: slower, with the same result."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    before = getattr(_fsdp_param, CUT, None)
    if before is None:
        yield
        return
    setattr(_fsdp_param, CUT, Pieces)
    try:
        yield
    finally:
        setattr(_fsdp_param, CUT, before)


def is_meta(x: Tensor) -> bool:
    """Whether a tensor has a shape and no memory."""
    return x.device.type == "meta"


def materialize(module: nn.Module, device: str) -> None:
    """Give the meta tensors of a sharded module memory on ``device``, without setting values."""
    made: dict[Tensor, Tensor] = {}

    def empty(x: Tensor) -> Tensor:
        if not is_meta(x):
            return x
        if not isinstance(x, nn.Parameter):  # torch.tensor makes none that is fake on this device
            return torch.empty(x.shape, dtype=x.dtype, device=device)
        if x not in made:
            made[x] = torch.empty_like(x, device=device)
        return made[x]

    names: dict[Tensor, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    module._apply(empty)
    for first, *tied in names.values():  # each use has got a parameter of its own
        for name in tied:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))


class WholeParameters(nn.Module):
    """The parameters of a divided module, each whole while an initialiser sets its values.

    An initialiser goes through the parameters of a module. This module yields its parameters one after
    another, with the values that the constructors give vectors, and copies values that are written into a
    parameter to this rank's part. So no rank holds more than one whole parameter.

    Args:
        module: the module that a backend has divided.
        parts: the part of each parameter that this rank holds, by name.
        attributes: the attributes of the whole parameters, by name: :func:`attributes_of`.
        build: function that builds the same module again, on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Mapping[str, HeldPart],
        attributes: Mapping[str, Mapping[str, Any]],
        build: Callable[[], nn.Module],
    ):
        super().__init__()
        self.held_buffers = dict(module.named_buffers())
        self.parts, self.attributes, self.build = parts, attributes, build
        self.constructed: dict[str, nn.Parameter] = {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if not self.constructed:
            self._construct()
        for name, part in self.parts.items():
            constructed = self.constructed[name]
            whole = nn.Parameter(torch.empty_like(constructed, device=part.values.device))
            vars(whole).update(self.attributes[name])
            with torch.no_grad():
                if not is_meta(constructed):
                    whole.copy_(constructed)
                before = whole._version
                yield name, whole
                if whole._version != before:
                    part.values.copy_(part.of(whole))

    @torch.no_grad()
    def _construct(self) -> None:
        """Copy the values of buffers and vectors from a newly built module without memory for matrices."""
        with _matrices_on_meta():
            made = self.build()
        for name, buffer in made.named_buffers():
            self.held_buffers[name].copy_(buffer)
        self.constructed = dict(made.named_parameters())
        for name, part in self.parts.items():
            if not is_meta(values := self.constructed[name]):
                part.values.copy_(part.of(values))


def attributes_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes that strategies have set on each parameter, by the parameter's name."""
    return {name: dict(vars(p)) for name, p in module.named_parameters()}


@contextmanager
def _matrices_on_meta() -> Iterator[None]:
    """A context in which a module's parameter of several dims loses its memory as it is registered."""

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.ndim < 2:
            return None  # as it is
        return nn.Parameter(parameter.detach().to("meta"))

    handle = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
