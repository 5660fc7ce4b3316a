"""What calls take by the tables of measured rates that a cluster names.

Within a table the measured calls count alone. Beyond it a call takes what the model of the cluster's own
figures says, times what the nearest edge of the table takes by measurement over what it takes by that model.

How far from its measured rate FlashAttention-2 runs on calls unlike those that were measured, by its
design.

github.com/Dao-AILab/flash-attention, csrc/flash_attn/src/flash_bwd_launch_template.h and static_switch.h at
073afd5:

- It is compiled for some head sizes; another one runs as the next larger, with zeros: 72 as 96.
- Backward runs in one thread block for each block of keys, head and sample, and each walks all queries. Where
  there are fewer of them than multiprocessors, as in attention of many positions to a text of 120 tokens, the
  others are idle. Forward splits the keys of a query block further where there are few (flash_api.cpp,
  num_splits_heuristic).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from spbench.bench.measure.clusters.rate_tables import HEAD_SIZE, RateTable, collective_tables, rate_table
from spbench.bench.measure.clusters.rates import AttentionRate, Link
from spbench.bench.measure.simulator.program import AttentionCall, Program
from spbench.impls import WIRE_SHARE

#: bytes of a number in half precision
_HALF = 2


def matmul_sizes(table: RateTable, shapes: np.ndarray) -> np.ndarray:
    """[calls, 3]: m, n, k of matmuls of (batch, m, n, k) as a table has them. A batch counts as more
    rows. A matmul takes as long as its transpose, which counts where the table has that alone."""
    batch, m, n, k = shapes.T.astype(float)
    sizes, turned = np.stack([batch * m, n, k], axis=1), np.stack([n, batch * m, k], axis=1)
    outside, outside_turned = (np.abs(np.log(each / table.cut(each))).sum(axis=1) for each in (sizes, turned))
    return np.where((outside_turned < outside)[:, None], turned, sizes)


def matmul_seconds(
    name: str, shapes: np.ndarray, nbytes: np.ndarray, model: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Seconds of matmuls in half precision.

    Args:
        name: of the table.
        shapes: [calls, 4]: batch, m, n, k.
        nbytes: [calls]: that they read and write.
        model: seconds by FLOPs and bytes, as the cluster's own figures have them.
    """
    table = rate_table(name)
    sizes = matmul_sizes(table, shapes)
    edge = table.cut(sizes)
    edge_flops = 2.0 * edge.prod(axis=1)
    measured = edge_flops / table.rates(sizes)
    of_edge = model(edge_flops, _operand_bytes(edge))
    # what is read or written beside the operands of the table, as sums in float32, costs what the model says
    flops, moved = 2.0 * sizes.prod(axis=1), np.maximum(nbytes, _operand_bytes(sizes))
    return measured * model(flops, moved) / of_edge


def _operand_bytes(sizes: np.ndarray) -> np.ndarray:
    m, n, k = sizes.T
    return np.asarray(_HALF * (m * n + m * k + n * k))


def in_attention_table(rate: AttentionRate, call: AttentionCall) -> bool:
    """Whether a call is of the kind that the rate's table has, whatever its sizes."""
    return (
        rate.table.value is not None
        and call.direction == "forward"
        and call.mask == "causal"
        and call.head_size == HEAD_SIZE
        and call.queries == call.keys
    )


def attention_rate(rate: AttentionRate, call: AttentionCall, groups: int) -> float:
    """FLOP/s of calls for which :func:`in_attention_table` holds. Heads and groups of several samples count
    as if they were of one sample."""
    table = rate_table(rate.table.value or "")
    sizes = np.array([[call.length, call.heads, groups]], dtype=float)
    length = int(table.cut(sizes)[0, 0])
    return float(table.rates(sizes)[0]) * rate.at(call.length) / rate.at(length)


def lengths_measured(rate: AttentionRate) -> tuple[int, int] | None:
    """The shortest and the longest sequence that a rate was measured of; None: its source does not say."""
    if rate.table.value is not None:
        table = rate_table(rate.table.value)
        return int(table.smallest[0]), int(table.largest[0])
    return (min(rate.measured), max(rate.measured)) if rate.measured else None


def matmuls_covered(name: str, shapes: np.ndarray) -> np.ndarray:
    """[calls]: whether matmuls of (batch, m, n, k) lie within a table."""
    table = rate_table(name)
    return table.covers(matmul_sizes(table, shapes))


def ranks_measured(link: Link, kind: str) -> tuple[int, int] | None:
    """The smallest and the largest group that a link's table has of a collective; None: it has none."""
    if link.table.value is None or (table := collective_tables(link.table.value).get(kind)) is None:
        return None
    return int(table.smallest[0]), int(table.largest[0])


def collective_seconds(link: Link, kind: str, nbytes: float, ranks: int) -> float | None:
    """Seconds of a collective within a node, without a calibration; None: the link has no table with it.

    Args:
        nbytes: the payload, as :data:`WIRE_SHARE` defines it.
        ranks: of the group.
    """
    name = link.table.value
    return (
        None if name is None or kind not in collective_tables(name) else _seconds(name, kind, nbytes, ranks)
    )


@lru_cache(maxsize=2**16)
def _seconds(name: str, kind: str, nbytes: float, ranks: int) -> float:
    table = collective_tables(name)[kind]
    (fewest, _), (most, largest) = table.smallest, table.largest
    n = float(np.clip(ranks, fewest, most))
    # beyond the ranks that were measured, at the same bus bandwidth
    payload = nbytes * float(WIRE_SHARE[kind](ranks) / WIRE_SHARE[kind](int(n)))
    seconds, latency = float(1.0 / table.rates(np.array([[n, payload]]))[0]), _latency(table, n)
    if payload > largest:
        seconds += (payload - largest) / largest * (seconds - latency)
    if ranks > n:
        # a rank more costs what it does from half of the largest group to all of it
        seconds += (latency - _latency(table, n / 2)) * (ranks - n) / (n / 2)
    return seconds


def _latency(table: RateTable, ranks: float) -> float:
    """Seconds of the smallest message."""
    return float(1.0 / table.rates(np.array([[ranks, table.smallest[1]]]))[0])


def latency_and_bandwidth(link: Link, kind: str, nbytes: float, ranks: int) -> tuple[float, float] | None:
    """:func:`collective_seconds` as the smallest message's seconds and the rest's bus bandwidth (bytes/s)."""
    seconds = collective_seconds(link, kind, nbytes, ranks)
    latency = collective_seconds(link, kind, 0.0, ranks)
    if seconds is None or latency is None:
        return None
    return latency, float(WIRE_SHARE[kind](ranks)) * nbytes / max(seconds - latency, 1e-12)


def groups_of(program: Program, event: int) -> int:
    """How many heads of keys and values a forward call of attention in half precision has, over all
    sequences: by its bytes beyond queries, outputs and their sums in float32."""
    heads, queries, keys, size = (int(each) for each in program.shape[event])
    rest = float(program.nbytes[event]) - heads * queries * (2 * _HALF * size + 4)
    return int(np.clip(round(rest / (2 * _HALF * keys * size)), 1, heads))


#: that it is compiled for
HEAD_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
#: keys of a thread block of backward; of head sizes above WIDE fewer
BLOCK_KEYS, WIDE, BLOCK_KEYS_OF_WIDE = 128, 128, 64


def run_as(head_size: int) -> int:
    """The head size that kernels use for ``head_size`` features: the next size that they have, if any."""
    place = bisect_left(HEAD_SIZES, head_size)
    return HEAD_SIZES[place] if place < len(HEAD_SIZES) else head_size


def head_share(head_size: int, measured: int) -> float:
    """The useful share of the FLOPs computed at a head size, over the same share at the ``measured`` size."""
    return (head_size / run_as(head_size)) / (measured / run_as(measured))


def backward_share(heads: int, keys: int, head_size: int, multiprocessors: int) -> float:
    """The rate of a backward pass over the rate on a card that is full.

    Args:
        heads: of all samples together, B x Z.
        keys: of each head.
        multiprocessors: of the card.
    """
    block = BLOCK_KEYS if run_as(head_size) <= WIDE else BLOCK_KEYS_OF_WIDE
    blocks = -(-keys // block)
    # a last block that is not full computes as much as one that is
    return min(1.0, heads * blocks / multiprocessors) * keys / (blocks * block)
