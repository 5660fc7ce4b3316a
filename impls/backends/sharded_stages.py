"""Helpers of sharded models (ZeRO-2 and 3): pipeline stages, groups of ranks, parts, closed forms.

In torch.distributed.pipelining each backward of a stage adds to whole gradients and keeps gathered weights
(``backward_maybe_with_nosync`` of its stage.py, torch 2.13). After the stage's last backward of the step it
reduce-scatters the gradients, unit by unit, and frees the weights (``perform_reduce_grad``).

Ranks share one copy of a model in shards under hybrid sharding (HSDP; Zhao et al., arXiv 2304.11277, section
3.2.2). A parameter is cut along its first dim, padded to a multiple of N. If this dim has fewer rows than N,
the parameter is cut along the first other dim that N divides; if there is none, a parameter of more than two
dims is cut along its rows as the matrix that programs have, so that it is not padded to N parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.backends.sharding_options import ShardingOptions, units_of
from spbench.impls.composition import chunks_of
from spbench.impls.place import Place
from spbench.impls.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo


def sum_kept(stage: FSDPModule) -> None:
    """Reduce-scatter the gradients that backwards through a stage have added up, and free its weights."""
    from torch.distributed.fsdp import fully_shard

    sum_after_backward(stage, True)
    state = fully_shard.state(stage)  # type: ignore[attr-defined]  # not exported: torch's pipelining does this
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def sum_after_backward(stage: FSDPModule, yes: bool) -> None:
    """Let the next backward through a stage reduce-scatter the gradients that backwards have added up, and
    free weights; without ``yes``, let backwards add to whole gradients, and keep gathered weights."""
    stage.set_is_last_backward(yes)
    stage.set_reshard_after_backward(yes)
    stage.set_requires_gradient_sync(yes)


#: the dim of a mesh along which a model is sharded
SHARDS = -1


def in_groups(place: Place, axes: Sequence[str], whole: DeviceMesh, sharing: int) -> DeviceMesh:
    """A mesh of groups of ``sharing`` consecutive ranks, which share a model.

    Args:
        axes: the mesh axes of the ranks of ``whole``, a mesh of one dim.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    across = place.subgroup(*axes, size=sharing, across=True)
    within = place.subgroup(*axes, size=sharing)
    assert across is not None
    assert within is not None
    with _disable_current_modes():  # as in Place.submesh
        return DeviceMesh.from_group(
            [across, within],
            whole.device_type,
            mesh=whole.mesh.view(-1, sharing),
            mesh_dim_names=("replicate", "shard"),
        )


def mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    """The description that ``fully_shard`` takes of a mesh of one dim, or of a mesh of :func:`in_groups`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def cut_dim(shape: torch.Size, size: int) -> int:
    """The dim along which ``size`` ranks cut a parameter of this shape."""
    if shape[0] >= size:
        return 0
    return next((dim for dim, n in enumerate(shape) if n % size == 0), 0)


def cut_shape(shape: torch.Size, size: int) -> torch.Size:
    """The shape in which ``size`` ranks cut a parameter: its own, or that of a matrix."""
    if len(shape) < 3 or shape[0] >= size or any(n % size == 0 for n in shape):
        return shape
    return torch.Size((math.prod(shape[:-1]), shape[-1]))


def padded_elements(shape: torch.Size, size: int) -> int:
    """The number of elements of a parameter in messages, padding included."""
    shape = cut_shape(shape, size)
    n = shape[cut_dim(shape, size)]
    return shape.numel() // n * math.ceil(n / size) * size


def held_rows(shape: torch.Size, size: int, rank: int) -> tuple[int, int]:
    """(first, count) of a rank's rows along the dim in which ``size`` ranks cut a parameter."""
    shape = cut_shape(shape, size)
    whole = shape[cut_dim(shape, size)]
    each = math.ceil(whole / size)
    first = min(whole, rank * each)
    return first, min(each, whole - first)


def own_part(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (a DTensor); any other tensor itself."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


#: the whole shapes of parameters that are cut as matrices, by (module, name of the parameter)
Shapes = Mapping[tuple[nn.Module, str], torch.Size]


def made_matrices(module: nn.Module, size_of: Callable[[nn.Parameter], int]) -> Shapes:
    """Give each parameter p the matrix shape in which ``size_of(p)`` ranks cut it; returns the shapes that
    parameters had before."""
    shapes = {}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and (shape := cut_shape(p.shape, size_of(p))) != p.shape:
                shapes[owner, name] = p.shape
                p.data = p.data.view(shape)
    return shapes


def whole_shapes(unit: nn.Module, shapes: Shapes) -> None:
    """Let ``fully_shard`` give a unit's gathered parameters the shapes from before :func:`made_matrices`."""
    from torch.distributed.fsdp import fully_shard

    for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
        for p in group.fsdp_params:
            if shape := shapes.get((p._module_info.module, p._module_info.param_name)):
                p._orig_size, p._contiguous_orig_stride = shape, torch.empty(shape, device="meta").stride()
                p.__class__ = _cut_as_matrix()


@cache
def _cut_as_matrix() -> type[Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    class CutAsMatrix(FSDPParam):
        """A parameter whose gradient is reduce-scattered as a matrix, but gathered in its whole shape."""

        def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
            return super()._get_grad_inner_tensor(grad).flatten(0, -2)

    return CutAsMatrix


def sharded_traffic(
    step: PlannedStep,
    summed_as: torch.dtype,
    reshards: Callable[[bool, ShardingOptions], bool],
    *,
    keeps: bool = False,
) -> Iterator[Traffic]:
    """Yields the messages of the backends ``zero2`` and ``zero3`` in a step.

    Args:
        summed_as: the dtype of gradients while they are summed.
        reshards: the function :meth:`FullySharded.reshards`.
        keeps: weights that are not freed after a forward are not freed after a backward either.
    """
    options, count, width = step.options, step.micro_batches, summed_as.itemsize
    assert isinstance(options, ShardingOptions)
    staged = step.around.stage.count > 1
    kept = staged or options.reduce_at == "kept"
    stages = [*zip(chunks_of(step.build()), step.passes(), strict=True)]
    for summed in step.summed:
        if options.own_weights == "apart" and summed.size == 1:
            continue
        axes, each, sums = summed.group_axes, options.sharing(summed.size), 0
        #: number of elements by how often they are gathered in a step
        forward, backward = Counter[int](), Counter[int]()
        for stage, passes in stages:
            units = units_of(stage, options)
            rest = {*stage.parameters()}.difference(*(unit.parameters() for unit in units))
            for p in stage.parameters():
                if step.strategy.partial_axes(p) != summed.axes:
                    continue
                elements = padded_elements(p.shape, each)
                sums += elements * p.requires_grad
                frees = reshards(p in rest, options)
                first, again = (count, count * frees)
                if kept or (keeps and not frees):
                    first, again = _gathers(passes, frees)
                forward[first] += elements
                backward[again] += elements
        for phase, words, gathered in (
            ("forward", "weights", forward),
            ("backward", "weights again", backward),
        ):
            for often, elements in gathered.items():
                nbytes = elements * step.element_bytes
                yield Traffic(phase, words, "all_gather", often, nbytes, axes, each)
        often = 1 if staged or options.reduce_at != "each" else count
        yield Traffic("backward", "gradients", "reduce_scatter", often, sums * width, axes, each)
        if (groups := summed.size // each) > 1:
            part = sums * width // each
            yield Traffic("backward", "over groups", "all_reduce", often, part, axes, groups)
        if step.precision.loss_scale:
            yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, axes, each)


def _gathers(passes: Iterable[bool], reshards: bool) -> tuple[int, int]:
    """How often a stage's weights are gathered in a step: for forwards, and for backwards.

    Args:
        passes: the stage's passes in their order: True for a forward, False for a backward.
        reshards: whether the weights are freed after each forward.
    """
    whole, counts = False, [0, 0]
    for forward in passes:
        counts[not forward] += not whole
        whole = not (forward and reshards)
    return counts[0], counts[1]
