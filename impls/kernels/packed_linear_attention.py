"""Linear attention of a chunk that is packed with several documents; the state starts from zero in each.

As the kernels with cu_seqlens of flash-linear-attention do, one call runs
:mod:`spbench.impls.kernels.linear_attention`, which has the shapes, for each document. Blocks begin where the
document begins. The first document may have begun before the chunk and the last may go on after the chunk, so
the state before the chunk reaches only the first document, and the gradient of the state after the chunk only
the last. The states at the boundaries of all documents' blocks lie one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import infer_schema
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.attended import Attended, Interval
from spbench.impls.kernels import linear_attention as each
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import differentiable, operator


@dataclass(frozen=True)
class Chunk:
    """The documents of a chunk of a sequence.

    Attributes:
        lengths: positions of each document that lie in the chunk.
        goes_on: whether the first document began before the chunk.
        continued: whether the last document goes on after the chunk.
    """

    lengths: tuple[int, ...]
    goes_on: bool = False
    continued: bool = False

    @classmethod
    def of(cls, attended: Attended, positions: Interval) -> Chunk:
        """The documents that lie, in whole or in part, in an interval of positions."""
        parts = attended.within_documents([positions]).tolist()
        (_, first, start, _), (last, _, _, end) = parts[0], parts[-1]
        ends = attended.ends[last] if attended.documents else end
        return cls(tuple(b - a for _, _, a, b in parts), first < start, end < ends)


def _boundaries(lengths: Sequence[int], block: int) -> list[int]:
    """The number of boundaries of blocks, and so of states, that each document has."""
    return [-(-n // min(block, n)) + 1 for n in lengths]


def _documents(lengths: Sequence[int], *tensors: Tensor) -> Iterator[Any]:
    """Yields for each document a tuple of its contiguous parts of the tensors [B, Z, L, ...]."""
    parts = [[part.contiguous() for part in x.split([*lengths], 2)] for x in tensors]
    return zip(*parts, strict=True)


def _at_boundaries(run: Any, lengths: Sequence[int], x: Tensor, y: Tensor, *rest: Any) -> Tensor:
    return torch.cat([run(*document, *rest) for document in _documents(lengths, x, y)], 2)


def _output(run: Any, lengths: Sequence[int], *given: Any) -> Tensor:
    q, k, v, decay, states, initial, block = given
    of_states = states.split(_boundaries(lengths, block), 2)
    firsts = [initial, *[None] * (len(lengths) - 1)]
    documents = zip(_documents(lengths, q, k, v), of_states, firsts, strict=True)
    return torch.cat([run(*x, decay, s.contiguous(), first, block) for x, s, first in documents], 2)


def _input_gradients(run: Any, lengths: Sequence[int], *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, d_o, decay, states, initial, d_states, d_final, block = given
    others: list[None] = [None] * (len(lengths) - 1)
    boundaries = _boundaries(lengths, block)
    documents = zip(
        _documents(lengths, q, k, v, d_o),
        states.split(boundaries, 2),
        [initial, *others],
        d_states.split(boundaries, 2),
        [*others, d_final],
        strict=True,
    )
    gradients = [
        run(*x, decay, s.contiguous(), first, d_s.contiguous(), last, block)
        for x, s, first, d_s, last in documents
    ]
    d_q, d_k, d_v = (torch.cat(parts, 2) for parts in zip(*gradients, strict=True))
    return d_q, d_k, d_v


def _operator(of_documents: Callable[..., Any], name: str) -> Any:
    """An operator that takes the arguments of linear_attention_NAME, the documents' lengths, and whether to
    run plain_NAME instead of the fused operator on each document."""
    fused, plain_form = (getattr(each, f"{form}_{name}") for form in ("linear_attention", "plain"))

    def run(*given: Any) -> Any:
        *arguments, lengths, plain = given
        return of_documents(plain_form if plain else fused, lengths, *arguments)

    schema = infer_schema(plain_form, mutates_args=()).replace(") ->", ", SymInt[] lengths, bool plain) ->")
    return operator(f"spbench::packed_linear_attention_{name}", schema=schema)(run)


#: the operators by the names of the steps
_OF_DOCUMENTS = {
    "states": _operator(_at_boundaries, "states"),
    "output": _operator(_output, "output"),
    "state_gradients": _operator(_at_boundaries, "state_gradients"),
    "input_gradients": _operator(_input_gradients, "input_gradients"),
}


@_OF_DOCUMENTS["states"].register_fake
@_OF_DOCUMENTS["state_gradients"].register_fake
def _(x: Tensor, y: Tensor, decay: Tensor | None, block: int, lengths: Sequence[int], plain: bool) -> Tensor:
    shape = *x.shape[:2], sum(_boundaries(lengths, block)), x.shape[3], y.shape[3]
    return x.new_empty(shape, dtype=state_dtype(x.dtype))


_OF_DOCUMENTS["output"].register_fake(each.room_for_output)
_OF_DOCUMENTS["input_gradients"].register_fake(each.room_for_input_gradients)

for _name, _flops in (
    ("states", each.boundary_flops),
    ("state_gradients", each.boundary_flops),
    ("output", each.output_flops),
    ("input_gradients", each.input_gradient_flops),
):
    # raw, because register_flop_formula has already wrapped these functions
    register_flop_formula(_OF_DOCUMENTS[_name].overload.overloadpacket, get_raw=True)(_flops)


class LinearAttentionSteps:
    """The four steps of the chunked algorithm, as fused kernels or operator by operator, for a chunk with one
    document or, where ``chunk`` is given, with several."""

    def __init__(self, fused: bool = True, chunk: Chunk | None = None):
        self.chunk = chunk
        steps = (self._step(name, fused) for name in _OF_DOCUMENTS)
        self.states, self.output, self.state_gradients, self.input_gradients = steps

    def _step(self, name: str, fused: bool) -> Callable[..., Any]:
        if self.chunk is None:
            step: Callable[..., Any] = getattr(each, f"{'linear_attention' if fused else 'plain'}_{name}")
            return step
        lengths = [*self.chunk.lengths]
        return lambda *arguments: _OF_DOCUMENTS[name](*arguments, lengths, not fused)

    def before(self, initial: Tensor | None) -> Tensor | None:
        """The state before the chunk, if its first document began before the chunk, else None."""
        return None if self.chunk is not None and not self.chunk.goes_on else initial

    def after(self, d_final: Tensor | None) -> Tensor | None:
        """The gradient of the state after the chunk, if its last document goes on, else None."""
        return None if self.chunk is not None and not self.chunk.continued else d_final

    def final_state(
        self, states: Tensor, initial: Tensor | None, decay: Tensor | None, length: int
    ) -> Tensor:
        """The state after the chunk [B, Z, D, A]; ``initial`` is the state before its first document."""
        if self.chunk is not None and len(self.chunk.lengths) > 1:
            initial = None
        return each.final_state(states, initial, decay, length)

    def initial_gradient(
        self, d_states: Tensor, d_final: Tensor | None, decay: Tensor | None, length: int
    ) -> Tensor:
        """The gradient of the state before the chunk; ``d_final`` is the final state's gradient."""
        if self.chunk is not None and len(self.chunk.lengths) > 1:
            d_final = None
        return each.initial_gradient(d_states, d_final, decay, length)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, lengths: tuple[int, ...], block: int
) -> tuple[Tensor, Tensor]:
    run, (queries, keys, values) = LinearAttentionSteps(chunk=Chunk(lengths)), each.contiguous(q, k, v)
    states = run.states(keys, values, decay, block)
    return run.output(queries, keys, values, decay, states, None, block), states


def _gradients(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Any) -> tuple[Tensor, ...]:
    decay, lengths, block, states = kept
    run, (q, k, v, d_o) = LinearAttentionSteps(chunk=Chunk(lengths)), each.contiguous(q, k, v, d_o)
    d_states = run.state_gradients(q, d_o, decay, block)
    gradients: tuple[Tensor, ...] = run.input_gradients(
        q, k, v, d_o, decay, states, None, d_states, None, block
    )
    return gradients


#: keeps its arguments and the states, but not the output
_PACKED = differentiable(_forward, _gradients, lambda *given: (*given[:6], given[-1]))


def packed_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    lengths: tuple[int, ...],
    *,
    block: int = each.BLOCK,
) -> Tensor:
    """Returns o [B, Z, L, A] of a whole sequence that is packed with documents of these lengths."""
    return _PACKED(q, k, v, decay, lengths, block)
