"""The place of one rank on the mesh of ranks, with its process groups.

Cells are checked with places too, so torch is imported only where there are process groups.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spbench.impls import folding
from spbench.impls.axes import MESH_AXES, Sizes, group_name, ranks_along, whole_mesh

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Place:
    """The place of one rank on a mesh: its coordinates, and the sizes of the mesh.

    Methods take axes of the mesh, or folded axes: "ep", "etp" and "edp".

    Attributes:
        sizes: number of ranks along each axis, in the order of the mesh, and along ep and etp; axes that are
            left out have one rank.
        coordinates: coordinates of this rank along each axis of the mesh; 0 along axes that are left out.
        mesh: the device mesh with the process groups; None for a rank without process groups, and for a
            single device.
        flattened: axes, as "dp_sp" in the order of MESH_AXES, by the name of the process group: of groups
            over several axes, over a part of an axis's ranks (:meth:`subgroup`), and along folded axes.
        subgroups: the groups of :meth:`subgroup` and :meth:`divided`, by their arguments, and of
            :meth:`group` along folded axes.
        submeshes: the meshes of :meth:`submesh`, by its axes; torch takes milliseconds to cut a mesh.
    """

    sizes: Sizes = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    flattened: dict[str, str] = field(default_factory=dict, compare=False)
    subgroups: dict[tuple[Any, ...], dist.ProcessGroup] = field(default_factory=dict, compare=False)
    submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, compare=False)

    @classmethod
    def on(cls, mesh: DeviceMesh, sizes: Sizes | None = None) -> Place:
        """The place of this process on a device mesh.

        Args:
            sizes: the sizes of a cell, for its folded axes; None: there are none.
        """
        names = mesh.mesh_dim_names or ()
        coordinates = mesh.get_coordinate()
        assert coordinates is not None, "this process is not on the mesh"
        of_mesh = dict(zip(names, mesh.shape, strict=True))
        return cls(
            of_mesh | folding.given_folds(sizes or {}), dict(zip(names, coordinates, strict=True)), mesh
        )

    @classmethod
    def of_rank(cls, sizes: Sizes, rank: int) -> Place:
        """The place of a global rank on a mesh of these sizes."""
        coordinates = {}
        for axis, size in reversed(whole_mesh(sizes).items()):
            rank, coordinates[axis] = divmod(rank, size)
        return cls(sizes, coordinates)

    def size(self, *axes: str) -> int:
        """The number of ranks along these axes together."""
        return ranks_along(axes, self.sizes)

    def rank(self, *axes: str) -> int:
        """The number of this rank among the ranks that differ from it only along these axes: its rank in
        their :meth:`group`, whose ranks are in the order of the mesh, not of ``axes``."""
        folded = folding.folds(axes)
        coordinates = folding.folded_place(self.stage_rank, self.sizes) if folded else self.coordinates
        number = 0
        for axis in folding.EXPERT_AXES if folded else self.sizes:
            if axis in axes:
                number = number * self.size(axis) + coordinates.get(axis, 0)
        return number

    @property
    def stage_rank(self) -> int:
        """The number of this rank among the ranks of its pipeline stage."""
        return self.rank(*(axis for axis in self.sizes if axis not in ("pp", *folding.FOLDED_AXES)))

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes over which a pipeline stage has several ranks."""
        return tuple(
            axis for axis in self.sizes if axis not in ("pp", *folding.FOLDED_AXES) and self.size(axis) > 1
        )

    @property
    def global_rank(self) -> int:
        """The number of this rank among all ranks of the mesh."""
        return self.rank(*(axis for axis in self.sizes if axis not in folding.FOLDED_AXES))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of the ranks that differ from this rank only along these axes; None if this is
        the only one, or without a device mesh. A group over several axes of more than one rank is made at the
        first call, so all ranks must ask for the same groups in the same order. A group along folded axes is
        made at the first call too, and only its ranks need to call."""
        several = [axis for axis in axes if self.size(axis) > 1]
        if self.mesh is None or not several:
            return None
        if folding.folds(several):
            return self._folded_group(several)
        if len(several) == 1:
            return self.mesh.get_group(several[0])
        return self.submesh(*several).get_group()

    def subgroup(self, *axes: str, size: int, across: bool = False) -> dist.ProcessGroup | None:
        """The process group of this rank's run, where :meth:`group` is cut into runs of ``size`` consecutive
        ranks; with ``across``, of the ranks that have this rank's position in each run. None if this is the
        only rank, or without a device mesh. The subgroup is made at the first call, and only its ranks need
        to call.

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
        along, number = self.members(*axes), self.rank(*axes)
        first = number // size * size
        ranks = along[number % size :: size] if across else along[first : first + size]
        return self._new_group(ranks, axes)

    def divided(self, *axes: str, parts: tuple[range, ...]) -> dist.ProcessGroup | None:
        """The process group of this rank's part, where :meth:`group` is divided into these parts, which may
        be of unlike sizes; None without a device mesh. The groups are made at the first call, and all ranks
        must ask for the same divisions in the same order: torch names a group after its ranks and the number
        of groups that a rank has, so each rank makes one, also a rank that is a part by itself."""
        if self.mesh is None or len(parts) == 1:
            return self.group(*axes)
        if (axes, parts) not in self.subgroups:
            along, number = self.members(*axes), self.rank(*axes)
            own = next(part for part in parts if number in part)
            self.subgroups[axes, parts] = self._new_group([along[rank] for rank in own], axes)
        return self.subgroups[axes, parts]

    def _folded_group(self, axes: Sequence[str]) -> dist.ProcessGroup:
        key = (tuple(axis for axis in folding.EXPERT_AXES if axis in axes), self.size(*axes), False)
        if key not in self.subgroups:
            self.subgroups[key] = self._new_group(self.members(*axes), axes)
        return self.subgroups[key]

    def members(self, *axes: str) -> list[int]:
        """The global ranks of :meth:`group`, in its order; only this rank if there is no group."""
        if not folding.folds(axes):
            others = [axis for axis in self.sizes if axis not in axes]
            return [*global_ranks(self.sizes, {axis: [self.coordinates.get(axis, 0)] for axis in others})]
        stage = [*global_ranks(self.sizes, {"pp": [self.coordinates.get("pp", 0)]})]
        return [stage[number] for number in folding.members(self.stage_rank, axes, self.sizes)]

    def _new_group(self, ranks: list[int], axes: Sequence[str]) -> dist.ProcessGroup:
        import torch.distributed as dist

        # only the group's ranks call: a pipeline stage without such a parameter does not
        group = dist.new_group(ranks, use_local_synchronization=True)
        self.flattened[group.group_name] = group_name(axes, self.sizes)
        return group

    def submesh(self, *axes: str) -> DeviceMesh:
        """The ranks of :meth:`group` as a mesh of one axis, which may have one rank. The mesh is made at the
        first call unless one axis has all its ranks, so all ranks must ask for the same meshes.

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

        group = self.group(*axes) if folding.folds(axes) else None
        several = [axis for axis in self.sizes if axis in axes and self.size(axis) > 1]
        # a device mesh keeps its ranks in real tensors on the CPU; inside a fake or metering mode these would
        # be made fake, or counted as part of the step
        with _disable_current_modes():
            if group is not None:
                return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=axes[:1])
            if len(several) == 1:
                return mesh[several[0]]
            if not several:  # a group that can communicate, unlike the fake group of an axis of one rank
                return DeviceMesh(mesh.device_type, [self.global_rank], mesh_dim_names=axes[:1])
            name = "_".join(axis for axis in MESH_AXES if axis in several)
            flat = mesh[tuple(several)]._flatten(name)
        self.flattened[flat.get_group().group_name] = name
        return flat


#: the place of a single device
ALONE = Place()


def global_ranks(sizes: Sizes, coordinates: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """Yields the global ranks whose coordinate along each axis is one of ``coordinates``, in the given order,
    the last axis of the mesh fastest; along axes that are left out every coordinate counts."""
    whole = whole_mesh(sizes)
    chosen = [coordinates.get(axis, range(size)) for axis, size in whole.items()]
    counts = [*whole.values()]
    strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
    for place in itertools.product(*chosen):
        yield sum(map(operator.mul, place, strides))
