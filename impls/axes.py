"""The axes of the mesh of ranks, and the place of one rank on it.

The mesh is row-major: ranks that differ along its last axis alone have consecutive numbers. The keys of a
mapping of sizes are in the order of the mesh, so that {"sp": 4, "dp": 2} and {"dp": 2, "sp": 4} give the same
groups of other ranks. It may also have ep and etp, which arrange the same ranks anew
(:mod:`spbench.impls.folding`).

Cells are checked and named with these, so torch is imported only where there are process groups.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spbench.impls.folding import (
    EXPERT_AXES,
    FOLDED_AXES,
    folded_place,
    folded_sizes,
    folds,
    given_folds,
    members,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class Axes(Sequence[str]):
    """The names of a mesh's axes in its default order, the last axis varying fastest."""

    def __init__(self, *names: str):
        self._names = list(names)

    def add(self, names: Iterable[str]) -> None:
        """Add the axes that a strategy brings; those that are there stay where they are."""
        self._names += [name for name in names if name not in self._names]

    def __contains__(self, name: object) -> bool:
        if name not in self._names:
            from spbench.impls.registries import strategies  # each brings its axes as it is imported

            strategies()
        return name in self._names

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)


#: data parallel replicas, pipeline stages, a second axis of sequence parallelism, tensor parallel and
#: sequence parallel ranks; then those that strategies bring (:attr:`Strategy.axes`)
MESH_AXES = Axes("dp", "pp", "cp", "tp", "sp")
#: the axes that are composed with every strategy; the others belong to the strategy that names them
COMPOSED_AXES = ("dp", "pp")

Sizes = Mapping[str, int]


def whole_mesh(sizes: Sizes) -> dict[str, int]:
    """Ranks along every axis of the mesh, in the order of ``sizes``; then 1 along those that it lacks. Folded
    axes are left out.

    Raises:
        ValueError: there is no such axis, or a size is not positive.
    """
    for axis, size in sizes.items():
        if (axis not in MESH_AXES and axis not in FOLDED_AXES) or size < 1:
            raise ValueError(
                f"axis {axis!r} of {size} ranks: the axes are {', '.join(MESH_AXES)}, each 1 or more"
            )
    given = {axis: size for axis, size in sizes.items() if axis not in FOLDED_AXES}
    return {**given, **{axis: 1 for axis in MESH_AXES if axis not in sizes}}


def check_axis_names(order: Sequence[str]) -> None:
    """Raise ValueError for an order that names an unknown axis, or an axis twice."""
    for axis in order:
        if axis not in MESH_AXES:
            raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(MESH_AXES)}")
    for axis in set(order):
        if order.count(axis) > 1:
            raise ValueError(f"the axis {axis} is there {order.count(axis)} times; name it once")


def in_order(sizes: Sizes, order: Sequence[str]) -> dict[str, int]:
    """Ranks along every axis of the mesh, the axes of ``order`` first, in that order; then those along folded
    axes of more than one rank.

    Raises:
        ValueError: the order names an unknown axis or one axis twice, or leaves out an axis of several ranks.
    """
    check_axis_names(order)
    for axis, size in sizes.items():
        if size > 1 and axis not in order and axis not in FOLDED_AXES:
            raise ValueError(f"leaves out the axis {axis}, which has {size} ranks; add it")
    return {**whole_mesh({axis: sizes.get(axis, 1) for axis in order}), **given_folds(sizes)}


def spelled(sizes: Sizes) -> str:
    """The axes that have more than one rank, each with its ranks, in the order of ``sizes``, as "dp2xsp8";
    "1" if no axis has. Folded axes follow, as "dp2xsp8·ep16"."""
    several = {axis: f"{axis}{size}" for axis, size in sizes.items() if size > 1}
    mesh = "x".join(text for axis, text in several.items() if axis not in FOLDED_AXES) or "1"
    return "·".join(filter(None, [mesh, "x".join(several[axis] for axis in FOLDED_AXES if axis in several)]))


def device_mesh(sizes: Sizes, device: str = "cpu") -> DeviceMesh:
    """The device mesh of these sizes over the ranks of the default process group, its axes in the order of
    ``sizes``; axes that are left out have one rank.

    Args:
        device: type of the devices on which the ranks' tensors are, as "cuda".

    Raises:
        ValueError: there is no such axis, or a size is not positive.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    whole = whole_mesh(sizes)
    # nobody communicates along an axis of one rank: a group of Gloo there would be three threads and a
    # meeting of all ranks, and these most of the time of a small job
    alone = [axis for axis, size in whole.items() if size == 1 < dist.get_world_size()]
    silent: dict[int | str, Any] = dict.fromkeys(alone, "fake")
    return init_device_mesh(
        device, tuple(whole.values()), mesh_dim_names=tuple(whole), backend_override=silent
    )


def ranks_along(axes: Sequence[str], sizes: Sizes) -> int:
    """The number of ranks that these axes, all of the mesh or all folded, have together; 1 without axes."""
    of = folded_sizes(sizes) if folds(axes) else sizes
    return math.prod(of.get(axis, 1) for axis in axes)


def union(axes: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Axes and others, each once."""
    return tuple(dict.fromkeys([*axes, *others]))


def group_name(axes: Sequence[str], sizes: Sizes) -> str:
    """The name of the group of ranks along these axes, as meters and closed forms have it: those with more
    than one rank, in the order of MESH_AXES or of EXPERT_AXES, as "dp_sp"."""
    order = EXPERT_AXES if folds(axes) else MESH_AXES
    return "_".join(axis for axis in order if axis in axes and ranks_along([axis], sizes) > 1)


def unused_axes(axes: Sequence[str], sizes: Sizes) -> list[str]:
    """The axes that have more than one rank and belong to neither a strategy of these ``axes`` nor the
    replicas and pipeline stages around it."""
    around = *axes, *COMPOSED_AXES, *FOLDED_AXES
    return [axis for axis, size in sizes.items() if size > 1 and axis not in around]


@dataclass(frozen=True)
class Place:
    """Which rank of which mesh this one is.

    Methods take axes of the mesh, or folded ones: "ep", "etp" and "edp".

    Attributes:
        sizes: ranks along each axis, in the order of the mesh; axes that are left out have one. With those
            along ep and etp.
        coordinates: of this rank along each axis of the mesh; 0 along those that are left out.
        mesh: the device mesh with the process groups; None for a rank that is only planned with, and for a
            single device.
        flattened: axes, as "dp_sp" in the order of MESH_AXES, of the groups that :meth:`group` made over
            several of them and :meth:`subgroup` over a part of their ranks, by the name of the group; also
            of groups along folded axes.
        subgroups: what :meth:`subgroup` has made, by its arguments, and :meth:`group` along folded axes.
        submeshes: what :meth:`submesh` has made, by its axes; torch takes milliseconds to cut one.
    """

    sizes: Sizes = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    flattened: dict[str, str] = field(default_factory=dict, compare=False)
    subgroups: dict[tuple[tuple[str, ...], int, bool], dist.ProcessGroup] = field(
        default_factory=dict, compare=False
    )
    submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, compare=False)

    @classmethod
    def on(cls, mesh: DeviceMesh, sizes: Sizes | None = None) -> Place:
        """The place of this process on a device mesh.

        Args:
            sizes: those of a cell, for the folded axes; None: there are none.
        """
        names = mesh.mesh_dim_names or ()
        coordinates = mesh.get_coordinate()
        assert coordinates is not None, "this process is not on the mesh"
        of_mesh = dict(zip(names, mesh.shape, strict=True))
        return cls(of_mesh | given_folds(sizes or {}), dict(zip(names, coordinates, strict=True)), mesh)

    @classmethod
    def of_rank(cls, sizes: Sizes, rank: int) -> Place:
        """The place of a global rank on a mesh of these sizes."""
        coordinates = {}
        for axis, size in reversed(whole_mesh(sizes).items()):
            rank, coordinates[axis] = divmod(rank, size)
        return cls(sizes, coordinates)

    def size(self, *axes: str) -> int:
        """The number of ranks that these axes have together."""
        return ranks_along(axes, self.sizes)

    def rank(self, *axes: str) -> int:
        """The number of this rank among those of the same coordinates along all other axes: its number in
        their :meth:`group`, whose ranks are in the order of the mesh, not of ``axes``."""
        folded = folds(axes)
        coordinates = folded_place(self.stage_rank, self.sizes) if folded else self.coordinates
        number = 0
        for axis in EXPERT_AXES if folded else self.sizes:
            if axis in axes:
                number = number * self.size(axis) + coordinates.get(axis, 0)
        return number

    @property
    def stage_rank(self) -> int:
        """The number of this rank among those of its pipeline stage."""
        return self.rank(*(axis for axis in self.sizes if axis not in ("pp", *FOLDED_AXES)))

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes over which a pipeline stage has several ranks."""
        return tuple(axis for axis in self.sizes if axis not in ("pp", *FOLDED_AXES) and self.size(axis) > 1)

    @property
    def global_rank(self) -> int:
        """The number of this rank among all."""
        return self.rank(*(axis for axis in self.sizes if axis not in FOLDED_AXES))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of the ranks that differ from this one along these axes alone; None where that is
        this rank alone, and without a device mesh. Over several axes of more than one rank it is made at the
        first call, so all ranks must ask for the same groups in the same order. One along folded axes is made
        at its first call too, which only its ranks need to make."""
        several = [axis for axis in axes if self.size(axis) > 1]
        if self.mesh is None or not several:
            return None
        if folds(several):
            return self._folded_group(several)
        if len(several) == 1:
            return self.mesh.get_group(several[0])
        return self.submesh(*several).get_group()

    def subgroup(self, *axes: str, size: int, across: bool = False) -> dist.ProcessGroup | None:
        """The process group of this rank's run of consecutive ranks of :meth:`group`, which consists of runs
        of ``size``; with ``across`` that of the ranks which have this one's place in each run. None where
        that is this rank alone, and without a device mesh. It is made at the first call, which only the ranks
        of the subgroup need to make.

        Raises:
            ValueError: ``size`` does not divide the ranks along the axes.
        """
        whole = self.size(*axes)
        if whole % size:
            along = ", ".join(axes)
            raise ValueError(f"{whole} ranks along {along} cannot be divided into runs of {size}")
        if self.mesh is None or size == (whole if across else 1):
            return None
        if size == (1 if across else whole):
            return self.group(*axes)
        key = (axes, size, across)
        if key not in self.subgroups:
            self.subgroups[key] = self._new_subgroup(axes, size, across)
        return self.subgroups[key]

    def _new_subgroup(self, axes: Sequence[str], size: int, across: bool) -> dist.ProcessGroup:
        import torch.distributed as dist

        along, number = dist.get_process_group_ranks(self.group(*axes)), self.rank(*axes)
        first = number // size * size
        ranks = along[number % size :: size] if across else along[first : first + size]
        return self._new_group(ranks, axes)

    def _folded_group(self, axes: Sequence[str]) -> dist.ProcessGroup:
        key = (tuple(axis for axis in EXPERT_AXES if axis in axes), self.size(*axes), False)
        if key not in self.subgroups:
            self.subgroups[key] = self._new_group(self.members(*axes), axes)
        return self.subgroups[key]

    def members(self, *axes: str) -> list[int]:
        """The global ranks of :meth:`group`, in its order; this rank alone where that is None."""
        if not folds(axes):
            others = [axis for axis in self.sizes if axis not in axes]
            return [*global_ranks(self.sizes, {axis: [self.coordinates.get(axis, 0)] for axis in others})]
        stage = [*global_ranks(self.sizes, {"pp": [self.coordinates.get("pp", 0)]})]
        return [stage[number] for number in members(self.stage_rank, axes, self.sizes)]

    def _new_group(self, ranks: list[int], axes: Sequence[str]) -> dist.ProcessGroup:
        import torch.distributed as dist

        # a pipeline stage without such a parameter does not ask
        group = dist.new_group(ranks, use_local_synchronization=True)
        self.flattened[group.group_name] = group_name(axes, self.sizes)
        return group

    def submesh(self, *axes: str) -> DeviceMesh:
        """The ranks of :meth:`group` as a mesh of one axis, which may be of one rank; made at the first call
        unless it is along one axis of more than one rank, so all ranks must ask for the same.

        Raises:
            ValueError: there is no device mesh.
        """
        if self.mesh is None:
            raise ValueError("process groups need a device mesh")
        if axes not in self.submeshes:
            self.submeshes[axes] = self._new_submesh(axes, self.mesh)
        return self.submeshes[axes]

    def _new_submesh(self, axes: tuple[str, ...], mesh: DeviceMesh) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.utils._python_dispatch import _disable_current_modes

        group = self.group(*axes) if folds(axes) else None
        several = [axis for axis in self.sizes if axis in axes and self.size(axis) > 1]
        # a device mesh keeps its ranks in real tensors on the CPU; inside a fake or metering mode these would
        # be made fake, or counted as part of the step
        with _disable_current_modes():
            if group is not None:
                return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=axes[:1])
            if len(several) == 1:
                return mesh[several[0]]
            if not several:  # a group that does communicate, unlike that of the axis
                return DeviceMesh(mesh.device_type, [self.global_rank], mesh_dim_names=axes[:1])
            name = "_".join(axis for axis in MESH_AXES if axis in several)
            flat = mesh[tuple(several)]._flatten(name)
        self.flattened[flat.get_group().group_name] = name
        return flat


#: the place of a single device
ALONE = Place()


def global_ranks(sizes: Sizes, coordinates: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """The global ranks whose coordinates are among those given along each axis, in the order in which these
    are given, the last axis of the mesh fastest; along axes that are left out any coordinate will do."""
    whole = whole_mesh(sizes)
    chosen = [coordinates.get(axis, range(size)) for axis, size in whole.items()]
    counts = [*whole.values()]
    strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
    for place in itertools.product(*chosen):
        yield sum(map(operator.mul, place, strides))
