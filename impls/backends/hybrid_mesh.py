"""Ranks that share one copy of a model in shards, and the groups of them: hybrid sharding (HSDP; Zhao et al.,
arXiv 2304.11277, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spbench.impls.place import Place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

#: the dim of a mesh along which a model is sharded
SHARDS = -1


def in_groups(place: Place, axes: Sequence[str], whole: DeviceMesh, sharing: int) -> DeviceMesh:
    """A mesh of groups of ``sharing`` consecutive ranks, which share a model.

    Args:
        axes: those of the ranks of ``whole``, a mesh of one dim.
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
    """What ``fully_shard`` is told of a mesh of one dim, or of one of :func:`in_groups`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
