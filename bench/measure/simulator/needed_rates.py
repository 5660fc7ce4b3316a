"""Figures of a cluster without which nothing can be timed on it."""

from __future__ import annotations

from spbench.bench.measure.clusters.cluster import Cluster


class RatesUnknown(ValueError):
    """The cluster profile lacks a figure without which a time cannot be known."""


def check_rates(cluster: Cluster, precision: str, world: int) -> None:
    """Raise :class:`RatesUnknown` unless the cluster has all figures to time this many ranks."""
    device = cluster.device
    rate = device.peak_flops_per_s.get(precision)  # type: ignore[call-overload]
    if rate is None or rate.value is None:
        raise RatesUnknown(f"{cluster.name}: device.peak_flops_per_s has no {precision}")
    if device.memory_bandwidth_bytes_per_s.value is None:
        raise RatesUnknown(f"{cluster.name}: device.memory_bandwidth_bytes_per_s is unknown")
    links = [cluster.node_link] if cluster.node_link and cluster.devices_per_node > 1 and world > 1 else []
    if world > (cluster.devices_per_node if links else 1):
        links.append(cluster.network)
    for link in links:
        assert link is not None
        if link.latency_s.value is None or link.bandwidth_bytes_per_s.value is None:
            raise RatesUnknown(f"{cluster.name}: a link's latency or bandwidth is unknown")
