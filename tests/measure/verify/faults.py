"""Strategies with a planted fault each, of the kinds that real code has had. None is registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce, reduce_from_group, ring
from spbench.impls.kernels import cross_entropy
from spbench.impls.strategies.base import SequenceDim, Site
from spbench.impls.strategies.layers import Linear
from spbench.impls.strategies.planning import ParameterKind
from spbench.impls.strategies.ring_self_attention import RingOutput, RingScores, RingSelfAttention
from spbench.impls.strategies.tensor_parallel import ColumnParallelLinear, TensorParallel
from spbench.impls.traffic import Traffic


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _GradientFactor(RingSelfAttention):
    """Ring Self-Attention with the gradients of q, k and v multiplied."""

    def factor(self) -> float:
        raise NotImplementedError

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        q, k, v = (_ScaleGradient.apply(x, self.factor()) for x in (q, k, v))
        return super().attention(q, k, v, mask, **how)


class ZeroGradients(_GradientFactor):
    def factor(self) -> float:
        return 0.0


class OneNthGradients(_GradientFactor):
    """As the public code of Ring Self-Attention has it."""

    def factor(self) -> float:
        return 1 / self.size


class SlightlyWrongOnLastRank(_GradientFactor):
    def factor(self) -> float:
        return 1 + 1e-6 * (self.rank == self.size - 1)


class NanOnLastRank(_GradientFactor):
    def factor(self) -> float:
        return float("nan") if self.rank == self.size - 1 else 1.0


class _OwnScores(RingSelfAttention):
    """Ring Self-Attention with another Q K^T."""

    scores: type[torch.autograd.Function]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        heads = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = self.scores.apply(q, k, self.group).unflatten(0, heads) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -10000)
        return RingOutput.apply(scores.softmax(-1).flatten(0, 1), v, self.group).unflatten(0, heads)


def _columns(x: Tensor, owner: int, chunk: int) -> Tensor:
    """The columns of x [BZ, L/N, L] that belong to the keys of ``owner``."""
    return x[:, :, owner * chunk : (owner + 1) * chunk]


def _one_late(chunks: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Every owner with the chunk of the owner before it; the first is right."""
    previous = None
    for owner, chunk in chunks:
        yield owner, chunk if previous is None else previous
        previous = chunk.clone()


class _StaleScores(RingScores):
    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        _, d_k, _ = RingScores.backward(ctx, d_scores)
        d_q = torch.zeros_like(q)
        for owner, keys in _one_late(ring(k, ctx.group)):
            d_q.baddbmm_(_columns(d_scores, owner, k.shape[1]), keys)
        return d_q, d_k, None


class StaleBlockInBackward(_OwnScores):
    """As a popular ring attention once had it."""

    scores = _StaleScores


class _WrongRowsScores(RingScores):
    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, _ = ctx.saved_tensors
        d_q, _, _ = RingScores.backward(ctx, d_scores)
        d_keys = all_reduce(torch.bmm(d_scores.transpose(1, 2), q), ctx.group)
        size, rank = ctx.group.size(), ctx.group.rank()
        return d_q, d_keys.chunk(size, 1)[(rank + 1) % size].contiguous(), None


class RowsOfAnotherRank(_OwnScores):
    scores = _WrongRowsScores


class _LocalKeyGradient(RingScores):
    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        d_q, _, _ = RingScores.backward(ctx, d_scores)
        own = _columns(d_scores, ctx.group.rank(), k.shape[1])
        return d_q, torch.bmm(own.transpose(1, 2), q), None


class KeyGradientsNotReduced(_OwnScores):
    scores = _LocalKeyGradient


class MaskForgotten(RingSelfAttention):
    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        return super().attention(q, k, v, None, **how)


class BiasesNotSynchronized(RingSelfAttention):
    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return super().partial_axes(parameter) if parameter.ndim > 1 else ()


class OrderLossOnEveryRank(RingSelfAttention):
    """Every rank takes its own first position for the sequence's."""

    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        return x[:, 0], 1.0


class SameChunkOnEveryRank(RingSelfAttention):
    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        assert not isinstance(dim, tuple)
        return x if dim is None else x.chunk(self.size, dim)[0]


class LinformerGradientNotReduced(RingSelfAttention):
    """The whole projection is used differently by each rank, so its gradient needs a sum too."""

    def project_sequence(self, x: Tensor, weight: Tensor) -> Tensor:
        return reduce_from_group(torch.matmul(weight, x), self.group)


class RaisesOnLastRank(RingSelfAttention):
    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        if self.rank == self.size - 1:
            raise ArithmeticError("planted")
        return super().attention(q, k, v, mask, **how)


class _RowsNotReduced(Linear):
    def __init__(self, in_features: int, out_features: int, tp: TensorParallel):
        super().__init__(in_features // tp.size, out_features, bias=False)
        tp.mark(self.weight, dim=1)


class RowParallelNotReduced(TensorParallel):
    """Megatron-LM's g without its all-reduce."""

    def linear_out(self, in_features: int, out_features: int) -> Linear:
        return _RowsNotReduced(in_features, out_features, self)


class _InputNotReduced(ColumnParallelLinear):
    forward = Linear.forward
    project = Linear.project


class ColumnInputGradientNotReduced(TensorParallel):
    """Megatron-LM's f without its all-reduce."""

    def linear_in(self, in_features: int, out_features: int) -> Linear:
        return _InputNotReduced(in_features, out_features, self)


class _Frozen(_RowsNotReduced):
    def __init__(self, in_features: int, out_features: int, tp: TensorParallel):
        super().__init__(in_features, out_features, tp)
        self.group = tp.group

    def project(self, x: Tensor) -> Tensor:
        return reduce_from_group(F.linear(x, self.weight.detach()), self.group)


class ParameterWithoutGradient(TensorParallel):
    def linear_out(self, in_features: int, out_features: int) -> Linear:
        return _Frozen(in_features, out_features, self)


class DenominatorNotReduced(TensorParallel):
    """The cross entropy of split logits with a sum of exponentials of each rank's part alone."""

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str) -> Tensor:
        honest, calls = cross_entropy.all_reduce, iter(range(3))

        def all_but_the_third(x: Tensor, *args: Any) -> Tensor:
            return x if next(calls) == 2 else honest(x, *args)

        with mock.patch.object(cross_entropy, "all_reduce", all_but_the_third):
            return super().cross_entropy(logits, labels, way=way)


class GatheredGradientSummed(TensorParallel):
    """Gathered logits, the gradient of which is summed over ranks that each have all of it."""

    gathers_logits = True  # type: ignore[assignment]

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * self.size)
        return super().cross_entropy(logits, labels, way=way)


class NextRanksWeights(TensorParallel):
    """Initialised as if this were the next rank."""

    def mark(self, parameter: nn.Parameter, dim: int = 0) -> nn.Parameter:
        super().mark(parameter, dim)
        shard = parameter.spbench_shard  # type: ignore[attr-defined]
        if dim == 0 and parameter.ndim == 2:
            object.__setattr__(shard, "index", (self.rank + 1) % self.size)
        return parameter


class WrongClosedForm(TensorParallel):
    """The all-reduces of backward are counted twice."""

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for entry in super().communication(sites, element_bytes):
            yield entry.times(2) if entry.phase == "backward" else entry


class SplitsTheVocabularyInSilence(TensorParallel):
    """As if every rank held all rows of the vocabulary."""

    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        return () if kind == "vocabulary" else super().split_over(kind)
