"""The axes of the mesh of ranks; :mod:`spbench.impls.place` has the place of one rank on it.

The mesh is row-major: ranks that differ only along its last axis have consecutive numbers. The keys of a
mapping of sizes are in the order of the mesh, so {"sp": 4, "dp": 2} and {"dp": 2, "sp": 4} have groups of the
same sizes with other ranks. A mapping may also have ep and etp, which arrange the same ranks in another way
(:mod:`spbench.impls.folding`).

Cells are checked and named with axes, so torch is imported only where there are process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spbench.impls import folding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Axes(Sequence[str]):
    """The names of a mesh's axes in its default order, the last axis varying fastest."""

    def __init__(self, *names: str):
        self._names = list(names)
        #: imports all strategies, which may add axes; set by :mod:`impls.registries`
        self.look: Callable[[], object] = lambda: None

    def add(self, names: Iterable[str]) -> None:
        """Append the axes of a strategy that are not present yet."""
        self._names += [name for name in names if name not in self._names]

    def __contains__(self, name: object) -> bool:
        if name not in self._names:
            self.look()
        return name in self._names

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)


#: data parallel replicas, pipeline stages, a second axis of sequence parallelism, tensor parallel and
#: sequence parallel ranks; then axes that strategies add (:attr:`Strategy.axes`)
MESH_AXES = Axes("dp", "pp", "cp", "tp", "sp")
#: the axes that are composed with every strategy; the others belong to the strategy that names them
COMPOSED_AXES = ("dp", "pp")

Sizes = Mapping[str, int]


def whole_mesh(sizes: Sizes) -> dict[str, int]:
    """The number of ranks along every axis of the mesh, in the order of ``sizes``, then 1 for each missing
    axis. Folded axes are left out.

    Raises:
        ValueError: there is no such axis, or a size is not positive.
    """
    for axis, size in sizes.items():
        if (axis not in MESH_AXES and axis not in folding.FOLDED_AXES) or size < 1:
            raise ValueError(
                f"axis {axis!r} of {size} ranks: the axes are {', '.join(MESH_AXES)}, each 1 or more"
            )
    of_mesh = {axis: size for axis, size in sizes.items() if axis not in folding.FOLDED_AXES}
    return {**of_mesh, **{axis: 1 for axis in MESH_AXES if axis not in sizes}}


def check_axis_names(order: Sequence[str]) -> None:
    """Raise ValueError for an order that names an unknown axis, or an axis twice."""
    for axis in order:
        if axis not in MESH_AXES:
            raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(MESH_AXES)}")
    for axis in set(order):
        if order.count(axis) > 1:
            raise ValueError(f"the axis {axis} is there {order.count(axis)} times; name it once")


def in_order(sizes: Sizes, order: Sequence[str]) -> dict[str, int]:
    """The number of ranks along every axis of the mesh, the axes of ``order`` first, in that order; then
    along the folded axes of more than one rank.

    Raises:
        ValueError: the order names an unknown axis or one axis twice, or leaves out an axis of several ranks.
    """
    check_axis_names(order)
    for axis, size in sizes.items():
        if size > 1 and axis not in order and axis not in folding.FOLDED_AXES:
            raise ValueError(f"leaves out the axis {axis}, which has {size} ranks; add it")
    return {**whole_mesh({axis: sizes.get(axis, 1) for axis in order}), **folding.given_folds(sizes)}


def spelled(sizes: Sizes) -> str:
    """The text of the axes with more than one rank, in the order of ``sizes``, as "dp2xsp8"; "1" if there is
    no such axis. Folded axes follow, as "dp2xsp8·ep16"."""
    several = {axis: f"{axis}{size}" for axis, size in sizes.items() if size > 1}
    mesh = "x".join(text for axis, text in several.items() if axis not in folding.FOLDED_AXES) or "1"
    return "·".join(
        filter(None, [mesh, "x".join(several[axis] for axis in folding.FOLDED_AXES if axis in several)])
    )


def device_mesh(sizes: Sizes, device: str = "cpu") -> DeviceMesh:
    """The device mesh of these sizes over the ranks of the default process group, its axes in the order of
    ``sizes``; axes that are left out have one rank.

    Args:
        device: type of the ranks' devices, as "cuda".

    Raises:
        ValueError: there is no such axis, or a size is not positive.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    whole = whole_mesh(sizes)
    # nobody communicates along an axis of one rank: Gloo would start three threads for its group and let all
    # ranks meet, which would be most of the time of a small job
    alone = [axis for axis, size in whole.items() if size == 1 < dist.get_world_size()]
    silent: dict[int | str, Any] = dict.fromkeys(alone, "fake")
    return init_device_mesh(
        device, tuple(whole.values()), mesh_dim_names=tuple(whole), backend_override=silent
    )


def ranks_along(axes: Sequence[str], sizes: Sizes) -> int:
    """The number of ranks of these axes together, which are all of the mesh or all folded; 1 without axes."""
    of = folding.folded_sizes(sizes) if folding.folds(axes) else sizes
    return math.prod(of.get(axis, 1) for axis in axes)


def union(axes: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """The axes of both arguments, each once, in order."""
    return tuple(dict.fromkeys([*axes, *others]))


def group_name(axes: Sequence[str], sizes: Sizes) -> str:
    """The name of the group of ranks along these axes, in meters and closed forms: the axes with more than
    one rank, in the order of MESH_AXES or of EXPERT_AXES, as "dp_sp"."""
    order = folding.EXPERT_AXES if folding.folds(axes) else MESH_AXES
    return "_".join(axis for axis in order if axis in axes and ranks_along([axis], sizes) > 1)


def unused_axes(axes: Sequence[str], sizes: Sizes) -> list[str]:
    """The axes with more than one rank that neither a strategy of these ``axes`` nor the replicas and
    pipeline stages around the strategy use."""
    around = *axes, *COMPOSED_AXES, *folding.FOLDED_AXES
    return [axis for axis, size in sizes.items() if size > 1 and axis not in around]
