"""How far from its measured rate FlashAttention-2 runs on calls unlike those that were measured, by its
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

KERNEL = "flash_attention_2"
#: that it is compiled for
HEAD_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
#: keys of a thread block of backward; of head sizes above WIDE fewer
BLOCK_KEYS, WIDE, BLOCK_KEYS_OF_WIDE = 128, 128, 64


def run_as(head_size: int) -> int:
    """The head size that a call of ``head_size`` features runs as; itself, where none is as large."""
    place = bisect_left(HEAD_SIZES, head_size)
    return HEAD_SIZES[place] if place < len(HEAD_SIZES) else head_size


def head_share(head_size: int, measured: int) -> float:
    """FLOPs that count over those that are computed, for a head size, over the same for the one that a rate
    was measured at."""
    return (head_size / run_as(head_size)) / (measured / run_as(measured))


def backward_share(heads: int, keys: int, head_size: int, multiprocessors: int) -> float:
    """The rate that a backward reaches over that of a full card.

    Args:
        heads: of all samples together, B x Z.
        keys: of each.
        multiprocessors: of the card.
    """
    block = BLOCK_KEYS if run_as(head_size) <= WIDE else BLOCK_KEYS_OF_WIDE
    blocks = -(-keys // block)
    # a last block that is not full computes as much as one that is
    return min(1.0, heads * blocks / multiprocessors) * keys / (blocks * block)
