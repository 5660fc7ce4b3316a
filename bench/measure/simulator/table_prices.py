"""The seconds of calls by the tables of measured rates that a cluster names.

Within a table only the measured calls count. A call beyond the table takes the seconds by the cluster's own
figures, times a correction: at the nearest edge of the table, measured seconds over seconds by those figures.

Also, how FlashAttention-2's rate on calls unlike the measured calls follows from its design, by
github.com/Dao-AILab/flash-attention, csrc/flash_attn/src/flash_bwd_launch_template.h and static_switch.h at
073afd5:

- The kernel is compiled for some head sizes; another size runs as the next larger, padded with zeros.
- Backward runs one thread block for each block of keys, head and sample, and each thread block walks all
  queries. If there are fewer thread blocks than multiprocessors, for example in attention to a text of 120
  tokens, the other multiprocessors are idle. Forward splits keys further if there are few query blocks
  (flash_api.cpp, num_splits_heuristic).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.clusters.rate_tables import HEAD_SIZE, RateTable, collective_tables, rate_table
from spbench.bench.measure.clusters.rates import AttentionRate, Direction, Link, Mask
from spbench.bench.measure.simulator.program import Category, Program
from spbench.impls import WIRE_SHARE

#: bytes of a number in half precision
_HALF = 2


def matmul_sizes(table: RateTable, shapes: np.ndarray) -> np.ndarray:
    """[calls, 3]: the m, n, k by which a table is read, for matmuls of (batch, m, n, k). A batch counts as
    more rows. A matmul takes as long as its transpose, so the one nearer to the table is used."""
    batch, m, n, k = shapes.T.astype(float)
    sizes, turned = np.stack([batch * m, n, k], axis=1), np.stack([n, batch * m, k], axis=1)
    outside, outside_turned = (np.abs(np.log(each / table.cut(each))).sum(axis=1) for each in (sizes, turned))
    return np.where((outside_turned < outside)[:, None], turned, sizes)


def matmul_seconds(
    name: str, shapes: np.ndarray, nbytes: np.ndarray, model: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """[calls]: the seconds of matmuls in half precision.

    Args:
        name: the name of the table.
        shapes: [calls, 4]: batch, m, n, k.
        nbytes: [calls]: bytes that the matmuls read and write.
        model: returns seconds from FLOPs and bytes, by the cluster's own figures.
    """
    table = rate_table(name)
    sizes = matmul_sizes(table, shapes)
    edge = table.cut(sizes)
    edge_flops = 2.0 * edge.prod(axis=1)
    measured = edge_flops / table.rates(sizes)
    of_edge = model(edge_flops, _operand_bytes(edge))
    # bytes beyond the table's operands, for example sums in float32, are priced by the model
    flops, moved = 2.0 * sizes.prod(axis=1), np.maximum(nbytes, _operand_bytes(sizes))
    return measured * model(flops, moved) / of_edge


def _operand_bytes(sizes: np.ndarray) -> np.ndarray:
    m, n, k = sizes.T
    return np.asarray(_HALF * (m * n + m * k + n * k))


#: the first names of PRECISION_NAMES that are half precisions, for which attention kernels have rates
_HALVES = 2


class AttentionCall(NamedTuple):
    """A kind of call of an attention kernel, for which a card has one rate.

    Attributes:
        heads: the heads of all sequences together.
        keys, queries: positions of keys and of queries in each head.
        length: the lesser of queries and keys.
    """

    direction: Direction
    mask: Mask
    head_size: int
    heads: int
    keys: int
    length: int
    queries: int


def attention_calls(program: Program) -> Iterator[tuple[AttentionCall, np.ndarray]]:
    """(kind of call, its events), for the attention kernels in half precision that store no scores."""
    attends = program.of(Category.ATTENTION) & (program.precision < _HALVES) & program.shape.any(axis=1)
    calls = np.column_stack([program.name[attends], program.shape[attends], program.flops[attends]])
    # a ring's consecutive calls are equal
    first = np.append(True, (calls[1:] != calls[:-1]).any(1))[: len(calls)]
    kinds, places = np.unique(calls[first], axis=0, return_inverse=True)
    places = places.ravel()[np.cumsum(first) - 1]
    at = np.flatnonzero(attends)
    for place, (name, heads, queries, keys, head_size, flops) in enumerate(kinds):
        backward = program.names[int(name)].endswith("_backward")
        pairs = flops / (2 * head_size * (5 if backward else 2))  # as forward_flops and backward_flops
        mask: Mask = "causal" if pairs < heads * queries * keys else "whole"
        direction: Direction = "backward" if backward else "forward"
        length = min(int(queries), int(keys))
        call = AttentionCall(direction, mask, int(head_size), int(heads), int(keys), length, int(queries))
        yield call, at[places == place]


def in_attention_table(rate: AttentionRate, call: AttentionCall) -> bool:
    """Whether a call is of the kind in the rate's table: causal self-attention, forward, of one head size."""
    return (
        rate.table.value is not None
        and call.direction == "forward"
        and call.mask == "causal"
        and call.head_size == HEAD_SIZE
        and call.queries == call.keys
    )


def attention_rate(rate: AttentionRate, call: AttentionCall, groups: int) -> float:
    """The FLOP/s of a call for which :func:`in_attention_table` holds. ``groups``: heads of keys and values;
    heads and groups of several samples count as if they belonged to one sample."""
    table = rate_table(rate.table.value or "")
    sizes = np.array([[call.length, call.heads, groups]], dtype=float)
    length = int(table.cut(sizes)[0, 0])
    return float(table.rates(sizes)[0]) * rate.at(call.length) / rate.at(length)


def lengths_measured(rate: AttentionRate) -> tuple[int, int] | None:
    """(shortest, longest) of the sequence lengths at which a rate was measured; None: not known."""
    if rate.table.value is not None:
        table = rate_table(rate.table.value)
        return int(table.smallest[0]), int(table.largest[0])
    return (min(rate.measured), max(rate.measured)) if rate.measured else None


def collective_seconds(link: Link, kind: str, nbytes: float, ranks: int) -> float | None:
    """Seconds of a collective within a node, without a calibration; None: the link has no table of it.

    Args:
        nbytes: the payload, as :data:`WIRE_SHARE` defines it.
        ranks: the number of ranks in the group.
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
    # groups larger or smaller than the measured groups have the same bus bandwidth
    payload = nbytes * float(WIRE_SHARE[kind](ranks) / WIRE_SHARE[kind](int(n)))
    seconds, latency = float(1.0 / table.rates(np.array([[n, payload]]))[0]), _latency(table, n)
    if payload > largest:
        seconds += (payload - largest) / largest * (seconds - latency)
    if ranks > n:
        # each further rank adds the latency that a rank adds between half and all of the largest group
        seconds += (latency - _latency(table, n / 2)) * (ranks - n) / (n / 2)
    return seconds


def _latency(table: RateTable, ranks: float) -> float:
    """The seconds of a table's smallest message, in a group of ``ranks`` ranks."""
    return float(1.0 / table.rates(np.array([[ranks, table.smallest[1]]]))[0])


def latency_and_bandwidth(link: Link, kind: str, nbytes: float, ranks: int) -> tuple[float, float] | None:
    """:func:`collective_seconds` as the smallest message's seconds and the rest's bus bandwidth (bytes/s)."""
    seconds = collective_seconds(link, kind, nbytes, ranks)
    latency = collective_seconds(link, kind, 0.0, ranks)
    if seconds is None or latency is None:
        return None
    return latency, float(WIRE_SHARE[kind](ranks)) * nbytes / max(seconds - latency, 1e-12)


def groups_of(program: Program, event: int) -> int:
    """The number of key-value heads, over all sequences, of a forward attention call in half precision,
    computed from its bytes beyond queries, outputs and the float32 sums of the scores."""
    heads, queries, keys, size = (int(each) for each in program.shape[event])
    rest = float(program.nbytes[event]) - heads * queries * (2 * _HALF * size + 4)
    return int(np.clip(round(rest / (2 * _HALF * keys * size)), 1, heads))


#: head sizes for which FlashAttention-2 is compiled
HEAD_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
#: keys in a thread block of backward: for head sizes up to WIDE, and for larger ones
BLOCK_KEYS, WIDE, BLOCK_KEYS_OF_WIDE = 128, 128, 64


def run_as(head_size: int) -> int:
    """The head size that kernels use for ``head_size`` features: the next size that they have, if any."""
    place = bisect_left(HEAD_SIZES, head_size)
    return HEAD_SIZES[place] if place < len(HEAD_SIZES) else head_size


def head_share(head_size: int, measured: int) -> float:
    """The useful share of the FLOPs computed at a head size, over the same share at the ``measured`` size."""
    return (head_size / run_as(head_size)) / (measured / run_as(measured))


def backward_share(heads: int, keys: int, head_size: int, multiprocessors: int) -> float:
    """The rate of a backward pass of attention, over its rate when thread blocks fill the card (0 to 1).

    Args:
        heads: heads of all samples together, B x Z.
        keys: keys of each head.
        multiprocessors: multiprocessors of the card.
    """
    block = BLOCK_KEYS if run_as(head_size) <= WIDE else BLOCK_KEYS_OF_WIDE
    blocks = -(-keys // block)
    # a partly filled last block computes as much as a full block
    return min(1.0, heads * blocks / multiprocessors) * keys / (blocks * block)
