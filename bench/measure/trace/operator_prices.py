"""The cost of a call of an operator: the bytes that the call reads and writes, and its FLOPs.

Most operators stream: they take as long as their memory traffic, in which each argument is read once and each
result written once. The tables in operators.yaml name the exceptions. The cost of an operator that is in no
table, and that torch does not tag as streaming, is not known: the operator is priced by its bytes too, but
:attr:`Price.known` is false, and the result row names the operator (``unpriced_operators``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spbench import impls
from spbench.bench.measure.simulator.program import ALIGNED, PRECISION_NAMES, Category
from spbench.bench.measure.simulator.program_builder import NO_SHAPE
from spbench.bench.measure.trace.torch_internals import flop_registry, schema_of
from spbench.bench.yaml_files import read_yaml

_OTHER, _FP8 = PRECISION_NAMES.index("other"), PRECISION_NAMES.index("fp8")
_PRECISION = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_PRECISION |= {torch.float8_e4m3fn: _FP8, torch.float8_e5m2: _FP8}

#: tables of operators by name, which the file explains
OPERATORS = read_yaml(Path(__file__).with_name("operators.yaml"))
#: matmuls -> position of their first operand; the second follows it
MATMULS: dict[str, int] = OPERATORS["matmuls"]
_GROUPED = OPERATORS["grouped_matmuls"] | impls.GROUPED_MATMULS
_FREE = {*OPERATORS["free"], *impls.MAKES_ON_HOST, *impls.WITHIN_TRANSFERS}
_OVERWRITING, _COPIES_INTO, _LOOKUPS = (
    {*OPERATORS[kind]} for kind in ("overwriting", "copies_into", "lookups")
)
#: tags of operators that stream
_STREAMING_TAGS = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded, torch.Tag.view_copy}
_STREAMING = _OVERWRITING | _COPIES_INTO | _LOOKUPS | {*OPERATORS["streaming"]}
_STREAMING_FAMILIES = tuple(OPERATORS["streaming_families"])


def _of_whole_sequences(operator: Any, flops: Callable[..., int]) -> Callable[..., int]:
    """FLOPs of a call of an attention operator, by ``flops`` of its q, k and v and whether it is causal."""
    names = [argument.name for argument in schema_of(operator.default).arguments]

    def of_call(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        of = dict(zip(names, args, strict=False)) | kwargs
        return flops(*(of[name].shape for name in ("query", "key", "value")), of.get("is_causal", False))

    return of_call


#: FLOPs of attention over whole sequences. torch's counter does not know the CPU's kernels, which fake
#: tensors use, and it counts the scores that a causal mask hides, which flash attention does not compute
_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    operator: _of_whole_sequences(operator, flops)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    for end, flops in (("", impls.forward_flops), ("_backward", impls.backward_flops))
    for operator in [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{end}")]
}


def _softmax_shape(arguments: Sequence[Any], name: str) -> tuple[int, int, int, int]:
    """(B x Z, queries, keys, A) of a call of an attention kernel that stores no scores, from its q
    [B, Z, M, A], k and v [B, G, L, A]; in a backward a gradient comes before q. If v has another head size, A
    is the one head size at which the call's matmuls would have the same FLOPs, rounded down. The keys of
    attention to chosen keys, with q [B, M, Z, A] and positions [B, M, K], are the chosen ones."""
    backward, sparse = name.endswith("_backward"), name in impls.SPARSE_ATTENTION
    q, k, v = arguments[1:4] if backward else arguments[:3]
    values = arguments[-1] if sparse else v.shape[3]
    a = (3 * q.shape[3] + 2 * values) // 5 if backward else (q.shape[3] + values) // 2
    if sparse:
        return q.shape[0] * q.shape[2], q.shape[1], v.shape[2], a
    if name.startswith("ranged"):
        ranges, _, length = impls.Size.of(arguments[-1])
        return q.shape[0] * q.shape[1] * ranges, length, length, a
    return q.shape[0] * q.shape[1], q.shape[2], k.shape[2], a


def _scan_shape(arguments: Sequence[Any], block: int) -> tuple[int, int, int, int]:
    """(steps of the longest recurrence, how many recurrences as long have the steps of all, 0, 0) of a call
    that passes a state over blocks of ``block`` positions. A head of a document is a recurrence."""
    batch, length, heads = arguments[3].shape[:3]
    starts, ends = (0, *arguments[-1]), (*arguments[-1], length)
    steps = [-(-(end - start) // block) for start, end in zip(starts, ends, strict=True)]
    return max(steps), -(-sum(steps) * batch * heads // max(steps)), 0, 0


#: (category, bytes, FLOPs, precision, shape, strided elements, alignment) of a call, in the terms of
#: :class:`Program`; the last two are those of a matmul
CallFigures = tuple[int, int, int, int, tuple[int, int, int, int], int, int]


class Price:
    """The price of one operator's calls, worked out from its schema.

    Attributes:
        free: whether calls cost nothing.
        known: whether the operator is in a table of operators.yaml, or is known to stream.
    """

    def __init__(self, func: Any):
        schema = schema_of(func)
        self.name = name = schema.name.split("::")[1]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        aliases = [r.alias_info for r in schema.returns]
        is_view = any(a is not None and not a.is_write for a in aliases)
        makes = any(
            a is None and "Tensor" in str(r.type) for a, r in zip(aliases, schema.returns, strict=True)
        )
        self.free = name in _FREE or is_view or not (writes or makes)
        #: how many times the bytes of the results, and of each argument below, are moved
        self._returned = 1 if makes else 0
        weights = {a.name: _weight(a, name) for a in schema.arguments}
        self._keywords = {a.name: weights[a.name] for a in schema.arguments if a.kwarg_only}
        self._positional = [weights[a.name] for a in schema.arguments if not a.kwarg_only]
        if name in _LOOKUPS:
            self._positional[0], self._returned = 0, 2
        elif name in _COPIES_INTO:
            self._positional[:2], self._returned = [2, 0], 0
        elif name in impls.OVER_HOST_LINK:
            self._positional = [0, 1]  # the bytes of the source, once over the link
        elif name == "scatter_add_":
            # self [..., V] is touched only where the index points: read, add, write
            self._positional[0], self._positional[3] = 0, 3
        self._matmul = MATMULS.get(name, -1)
        self._grouped = _GROUPED.get(name, -1)
        formula = _ATTENTION_FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        self._formula = None if self._matmul >= 0 else formula
        stores_no_scores = "flash_attention" in name or name in impls.SPARSE_ATTENTION
        self._softmax = self._formula is not None and stores_no_scores
        self._category = (
            Category.ATTENTION
            if "softmax" in name or "attention" in name or func.namespace == "triton_matmuls"
            else Category.MEMORY_BOUND
        )
        if name == "index_scores":  # matmuls of several heads, which have no shape of one matmul
            self._category = Category.MATMUL
        if name in impls.OVER_HOST_LINK:
            self._category = Category.HOST_COPY
        elif name in impls.ON_HOST_CORES:
            self._category = Category.HOST_UPDATE
        elif name in impls.READ_BY_HOST:
            self._category, self._returned = Category.HOST_READ, 0
        self.known = (
            self.free
            or max(self._matmul, self._grouped) >= 0
            or self._formula is not None
            or func.namespace in ("spbench", "triton_streaming")  # those with matmuls have a formula
            or name in _STREAMING
            or name.startswith(_STREAMING_FAMILIES)
            or not _STREAMING_TAGS.isdisjoint(func.tags)
        )

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> CallFigures:
        """The figures of one call."""
        nbytes, precision = 0, _OTHER
        for value, weight in zip(args, self._positional, strict=False):
            if isinstance(value, Tensor):
                nbytes += value.nbytes * weight
                if precision == _OTHER:
                    precision = _PRECISION.get(value.dtype, _OTHER)
            elif isinstance(value, (tuple, list)):
                nbytes += nbytes_of(value) * weight
        for name, value in kwargs.items():
            nbytes += nbytes_of(value) * self._keywords.get(name, 1)
        if self._returned:
            nbytes += nbytes_of(result) * self._returned
        if self._grouped >= 0:
            # as one matmul of all rows: of rows [R, k] and weights [k, n], or of d_y [R, n] and rows [R, k]
            rows, other = args[self._grouped : self._grouped + 2]
            flops = 2 * rows.numel() * int((other if isinstance(other, Tensor) else other[0]).shape[-1])
            precision = _PRECISION.get(rows.dtype, _OTHER)
            return Category.MATMUL, nbytes, flops, precision, NO_SHAPE, 0, ALIGNED
        if self._matmul < 0:
            flops = 0 if self._formula is None else self._formula(*args, **kwargs, out_val=result)
            shape = _softmax_shape(args, self.name) if self._softmax else NO_SHAPE
            if self.name in OPERATORS["scans"]:
                shape = _scan_shape(args, OPERATORS["scans"][self.name])
            return self._category, nbytes, flops, precision, shape, 0, ALIGNED
        a, b = args[self._matmul], args[self._matmul + 1]
        *_, m, k = a.shape
        n, batch = b.shape[-1], prod(a.shape[:-2])
        tensor = result if isinstance(result, Tensor) else args[0]  # added to in place
        strided = _strided_elements(a) + _strided_elements(b) + _strided_elements(tensor)
        precision = _PRECISION.get(a.dtype, _OTHER)
        return (
            Category.MATMUL,
            nbytes,
            2 * batch * m * n * k,
            precision,
            (batch, m, n, k),
            strided,
            min(map(_aligned, (a, b, tensor))),
        )


@cache
def price_of(func: Any) -> Price:
    """The price of an operator, a ``torch._ops.OpOverload``."""
    return Price(func)


def _weight(argument: Any, operator: str) -> int:
    """How many times the bytes of an argument are moved: 2 if it is read and written, else 1."""
    info = argument.alias_info
    read_and_written = info is not None and info.is_write and argument.name != "out"
    return 2 if read_and_written and operator not in _OVERWRITING else 1


def nbytes_of(value: Any) -> int:
    """The bytes of a tensor, or of all tensors in nested lists and tuples; 0 for other values."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(nbytes_of(item) for item in value)
    return 0


def _strided_elements(x: Tensor) -> int:
    """The number of elements of a matrix [..., r, c] with gaps between its rows (or columns); 0: no gaps."""
    *_, r, c = x.shape
    *_, row, column = x.stride()
    dense = (column == 1 and row == c) or (row == 1 and column == r) or r == 1 or c == 1
    return 0 if dense else x.numel()


def _aligned(x: Tensor) -> int:
    """The largest power of two of bytes, up to ALIGNED, that divides the stride of a matrix's rows (or
    columns)."""
    *_, r, c = x.shape
    *_, row, column = x.stride()
    if r == 1 or c == 1:
        return ALIGNED
    nbytes = (row if column == 1 else column) * x.element_size()
    return min(nbytes & -nbytes or ALIGNED, ALIGNED)
