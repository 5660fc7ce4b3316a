"""Buffers that the backward of FlashAttention's kernels allocates, by torch's caching allocator, and frees at
its end.

FlashAttention-2 (``mha_bwd`` of csrc/flash_attn/flash_api.cpp at 2.7, of which torch has a copy) allocates
the gradient of queries in float32, into which blocks add, and one number a query. Where several heads of
queries share one of keys, it also has gradients of keys and values for each head of queries, and adds them up
at the end. FlashAttention-3 (``mha_bwd`` of hopper/flash_api.cpp) allocates the same gradient of queries, two
numbers a query, and where heads are shared gradients of keys and values in float32.
"""

from collections.abc import Sequence

#: multiples to which kernels round positions and features up; FlashAttention-3 rounds some queries less
_POSITIONS, _FEATURES = 128, 32
_FLOAT32 = 4
#: kernels whose backward allocates
WITH_BUFFERS = ("flash_attention_2", "flash_attention_3")


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def inside_backward(
    kernel: str, q: Sequence[int], k: Sequence[int], itemsize: int, values: int | None = None
) -> list[int]:
    """Bytes of each buffer of a kernel's backward (all exist together), for the shapes q [B, Z, M, A] and k
    [B, G, L, A] and the bytes of an element; empty for kernels that :data:`WITH_BUFFERS` lacks. ``values`` is
    the number of a value's features, if not A (FlashAttention-3: hopper/flash_api.cpp, lines 1345 to 1368).
    """
    if kernel not in WITH_BUFFERS or itemsize != 2:  # these kernels run only in half precision
        return []
    batch, heads, queries, size = q
    groups, keys = k[1], k[2]
    size_up = _up(size, _FEATURES)
    a_query = batch * heads * _up(queries, _POSITIONS) * _FLOAT32
    shared = groups != heads
    if kernel == "flash_attention_2":
        of_keys = batch * heads * keys * size * itemsize
        return [a_query, a_query * size_up, *([of_keys] * 2 if shared else [])]
    a_feature = batch * groups * _up(keys, _POSITIONS) * _FLOAT32
    both = [a_feature * size_up, a_feature * _up(values or size, _FEATURES)]
    return [a_query, a_query, a_query * size_up, *(both if shared else [])]
