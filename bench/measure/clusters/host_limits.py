"""The memory of a node's host, the links by which its devices copy to and from it, and its cores' rate."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from spbench.bench.measure.clusters.sourced import Sourced
from spbench.bench.yaml_files import StrictModel


class HostMemory(StrictModel):
    """The host's memory.

    Attributes:
        total_bytes: of a node; null: no limit.
        link_bandwidth_bytes_per_s: of copies between a device and pinned memory, one direction; null: they
            cannot be timed.
        pageable_to_host_bytes_per_s: of a copy of one device to memory of the host that is not pinned and was
            just allocated, whose pages the kernel makes while it is written; null: that of pinned memory.
        pageable_to_device_bytes_per_s: of a copy from such memory; null: that of pinned memory.
        update_bytes_per_s: that AdamW on all cores of a node reads and writes, 28 a float32 parameter; null:
            a step that updates there cannot be timed.
        devices_per_link: how many devices share a link, all of which copy at once.
    """

    total_bytes: Sourced[PositiveInt] = Sourced(value=None, source="not known")
    link_bandwidth_bytes_per_s: Sourced[PositiveFloat] = Sourced(value=None, source="not measured")
    pageable_to_host_bytes_per_s: Sourced[PositiveFloat] = Sourced(value=None, source="not measured")
    pageable_to_device_bytes_per_s: Sourced[PositiveFloat] = Sourced(value=None, source="not measured")
    update_bytes_per_s: Sourced[PositiveFloat] = Sourced(value=None, source="not measured")
    devices_per_link: PositiveInt = 1

    @property
    def bytes_per_s(self) -> float | None:
        """A device's share of its link; None: not known."""
        bandwidth = self.link_bandwidth_bytes_per_s.value
        return None if bandwidth is None else bandwidth / self.devices_per_link
