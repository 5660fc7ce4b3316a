"""Clusters: devices and links, each figure with its source.

A figure that is not known is null: nothing is measured or limited by it.
"""

from __future__ import annotations

from functools import cache
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from bench.declaration import UserError, find_file, packaged, read_yaml, validate

PACKAGE = "scenarios.clusters"

Number = TypeVar("Number")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Strict, Generic[Number]):
    """A number, where it comes from, and, where it is not simply read there, how it follows from that.

    Attributes:
        fitted_on: for a calibrated figure, the published cells that it was fitted on.
    """

    value: Number | None
    source: str
    note: str = ""
    fitted_on: list[str] = []


class Device(_Strict):
    """One accelerator.

    Attributes:
        memory_total_bytes: what the card has.
        memory_context_bytes: what the CUDA context and its libraries take before the first tensor.
        memory_bandwidth_bytes_per_s: of the card's own memory.
        peak_flops_per_s: by precision (fp16, bf16, fp32, fp64).
    """

    name: str
    memory_total_bytes: Figure[PositiveInt]
    memory_context_bytes: Figure[NonNegativeInt]
    memory_bandwidth_bytes_per_s: Figure[PositiveFloat]
    peak_flops_per_s: dict[Literal["fp16", "bf16", "fp32", "fp64"], Figure[PositiveFloat]] = {}


class Network(_Strict):
    """The link of a node to the others, one way.

    Attributes:
        latency_s: of the smallest message.
        bandwidth_bytes_per_s: of large messages, a node.
    """

    latency_s: Figure[NonNegativeFloat]
    bandwidth_bytes_per_s: Figure[PositiveFloat]


class Cluster(_Strict):
    """A kind of machine that cells run on, or are taken to run on."""

    name: str
    about: str
    device: Device
    devices_per_node: PositiveInt = 1
    network: Network

    @property
    def usable_memory_bytes(self) -> int | None:
        """Bytes of a device that tensors and the allocator's own waste can have; None: no limit."""
        total = self.device.memory_total_bytes.value
        return None if total is None else total - (self.device.memory_context_bytes.value or 0)


def cluster_names() -> list[str]:
    """The clusters that come with the package."""
    return list(packaged(PACKAGE))


@cache
def load_cluster(name: str) -> Cluster:
    """The packaged cluster of that name, or the one in the YAML file at that path.

    Raises:
        UserError: there is none, or its file is wrong.
    """
    path = find_file(name, PACKAGE, "cluster")
    cluster = validate(Cluster, read_yaml(path), str(path))
    if cluster.name != path.stem:
        raise UserError(
            f"{path}: name: is {cluster.name!r}, but the file is called {path.stem!r}; make them agree"
        )
    usable = cluster.usable_memory_bytes
    if usable is not None and usable <= 0:
        raise UserError(f"{path}: device.memory_context_bytes: leaves nothing of memory_total_bytes")
    return cluster
