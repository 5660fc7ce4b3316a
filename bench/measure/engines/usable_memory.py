"""How much of a card the tensors of a cell can have: what CUDA leaves, less what NCCL takes to connect its
ranks."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.plan import Plan, plan
from spbench.bench.measure.simulator.costs import node_of
from spbench.impls.place import Place


def usable_memory_bytes(cell: Cell, planned: Plan | None = None) -> int | None:
    """Bytes of a device that the tensors of a cell and the allocator's own waste can have; None: no limit.

    Args:
        planned: the cell's plan, or that of one that has other numbers of layers and micro-batches alone;
            None: it is made.

    Raises:
        Unsupported: the cell cannot run as it is, on clusters that know what NCCL takes.
    """
    usable = load_cluster(cell.cluster).usable_memory_bytes
    return None if usable is None else usable - (exchange_memory_bytes(cell, planned) or 0)


def exchange_memory_bytes(cell: Cell, planned: Plan | None = None) -> int | None:
    """What NCCL's buffers for all-to-alls take of the device of rank 0, which has no fewer peers in its node
    than others; one communicator counts, that with the most. None: the cluster does not say.

    An all-to-all connects each pair of devices of a node over each of NCCL's channels, with buffers of all
    protocols at either end (``p2pSendSetup`` and ``p2pRecvSetup`` of src/transport/p2p.cc). Between nodes
    buffers are shared (src/transport/net.cc), and count as nothing. ``planned``: see
    :func:`usable_memory_bytes`.
    """
    cluster = load_cluster(cell.cluster)
    of_peer = cluster.device.memory_peer_bytes.value
    if of_peer is None:
        return None
    planned, most = planned or plan(cell), 0
    for entry in planned.traffic_of(0):
        if entry.collective == "all_to_all":
            group = Place.of_rank(planned.sizes, 0).members(*entry.axes)[: entry.group_size(planned.sizes)]
            most = max(most, sum(node_of(rank, cluster) == 0 for rank in group) - 1)
    return most * of_peer
