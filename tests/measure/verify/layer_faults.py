"""Tensor parallelism, Megatron's sequence parallelism, DSP and strategies around each other, with a planted
fault each, of the kinds that public code has had."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls import collectives
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels import cross_entropy
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.projection import project
from spbench.impls.layout import shard_of
from spbench.impls.models.bert import Bert, BertModel
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.dsp import DynamicSequenceParallel
from spbench.impls.strategies.grid import Grid
from spbench.impls.strategies.layers import Linear
from spbench.impls.strategies.megatron_sp import MegatronSP, whole_ids
from spbench.impls.strategies.sequence_chunks import chunk_of
from spbench.impls.strategies.tensor_parallel import ColumnParallelLinear, TensorParallel
from spbench.impls.traffic import Traffic
from tests.measure.verify.planting import patching, planted

TP, DSP = TensorParallel, DynamicSequenceParallel

# layers of tensor parallelism


class _RowsNotReduced(Linear):
    def __init__(self, in_features: int, out_features: int, tp: TensorParallel):
        super().__init__(in_features // tp.size, out_features, bias=False)
        tp.mark(self.weight, dim=1)
        self.group = tp.group


class _Frozen(_RowsNotReduced):
    def project(self, x: Tensor) -> Tensor:
        return collectives.reduce_from_group(F.linear(x, self.weight.detach()), self.group)


class _InputNotReduced(ColumnParallelLinear):
    forward = Linear.forward
    project = Linear.project


def _layer(cls: Any) -> Callable[..., Linear]:
    return lambda self, honest, in_features, out_features: cls(in_features, out_features, self)


# Megatron-LM's g without its all-reduce
RowParallelNotReduced = planted(TP, linear_out=_layer(_RowsNotReduced))
# Megatron-LM's f without its all-reduce
ColumnInputGradientNotReduced = planted(TP, linear_in=_layer(_InputNotReduced))
ParameterWithoutGradient = planted(TP, linear_out=_layer(_Frozen))
# latent attention's key that all heads share: each rank's heads make only a part of its gradient
SharedKeyOfOwnHeads = planted(TP, features_for_heads=lambda self, honest, x: x)
SharedKeyOfOwnPositions = planted(
    MegatronSP, features_for_heads=lambda self, honest, x: collectives.gather_from_group(x, 1, self.group)
)


# losses over a split vocabulary


def _all_but_the_third_sum(self: Any, honest: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
    """The sum of exponentials is that of each rank's part alone."""
    right, calls = cross_entropy.all_reduce, iter(range(3))

    def all_reduce(x: Tensor, *group: Any) -> Tensor:
        return x if next(calls) == 2 else right(x, *group)

    return patching(cross_entropy, all_reduce=all_reduce)(self, honest, *args, **how)


def _gradient_summed(
    self: Any, honest: Callable[..., Tensor], logits: Tensor, *args: Any, **how: Any
) -> Tensor:
    """Gathered logits, the gradient of which is summed over ranks that each have all of it."""
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient * self.size)
    return honest(logits, *args, **how)


def _own_positions_alone(self: Any, honest: Any, logits: Tensor, labels: Tensor, *, way: str) -> Tensor:
    """The losses of positions that are another rank's give no gradient to this rank's rows."""
    loss = TP.cross_entropy(self, logits, whole_ids(labels, self.group), way=way)
    return loss.chunk(self.size, 1)[self.rank]


def _labels_of_first_positions(self: Any, honest: Any, logits: Tensor, labels: Tensor, *, way: str) -> Any:
    rolled = whole_ids(labels, self.group).roll(labels.shape[1], 1)
    return honest(logits, rolled.chunk(self.size, 1)[self.rank], way=way)


DenominatorNotReduced = planted(TP, cross_entropy=_all_but_the_third_sum)
GatheredGradientSummed = planted(TP, gathers_logits=True, cross_entropy=_gradient_summed)
# the softmax's denominator is that of this rank's part of the vocabulary
DenominatorOfOwnRows = planted(
    TP, cross_entropy=patching(cross_entropy, all_gather_flat=lambda x, group: x.clone())
)
GradientsOfOwnPositionsAlone = planted(MegatronSP, cross_entropy=_own_positions_alone)
LabelsOfOwnPositions = planted(MegatronSP, cross_entropy=_labels_of_first_positions)


# what a strategy says of itself


def _as_the_next_rank(self: Any, honest: Any, parameter: nn.Parameter, dim: int = 0) -> nn.Parameter:
    honest(parameter, dim)
    if dim == 0 and parameter.ndim == 2:
        object.__setattr__(parameter.spbench_shard, "index", (self.rank + 1) % self.size)  # type: ignore[attr-defined]
    return parameter


def _backward_counted_twice(self: Any, honest: Any, sites: Sequence[Site], size: int) -> Iterator[Traffic]:
    for entry in honest(sites, size):
        yield entry.times(2) if entry.phase == "backward" else entry


# initialised as if this were the next rank
NextRanksWeights = planted(TP, mark=_as_the_next_rank)
WrongClosedForm = planted(TP, communication=_backward_counted_twice)
# as if every rank held all rows of the vocabulary
SplitsTheVocabularyInSilence = planted(
    TP, split_over=lambda self, honest, kind: () if kind == "vocabulary" else honest(kind)
)


# Megatron's sequence parallelism, and gradients summed over the wrong axes


class _SliceForSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strategy: MegatronSP) -> Tensor:
        ctx.strategy = strategy
        parts, arrival = collectives.start_all_gather(x, strategy.group)
        arrival.wait()
        return collectives.joined(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return chunk_of(gradient, 1, ctx.strategy.rank, ctx.strategy.size), None


LocalSliceForReduceScatter = planted(
    MegatronSP, leave=lambda self, honest, x: x.chunk(self.size, 1)[self.rank]
)
# taken for replicated, as they are in tensor parallelism; each rank saw only its own positions
NormsNotReduced = planted(MegatronSP, partial_axes=lambda self, honest, p: honest(p) if p.ndim > 1 else ())
# data parallelism over a group without the sequence axis, whose all-reduce is silently none (VeOmni, before
# pull request 1115)
SumLacksTheSequenceAxis = planted(
    TP, partial_axes=lambda self, honest, p: tuple(axis for axis in honest(p) if axis != "sp")
)
# gradients of what is not split summed over one axis too many, so that they come out tp times as large (as
# DeepSpeed issue 6841 reports of the sequence degree)
SumHasTheTensorAxisToo = planted(
    TP, partial_axes=lambda self, honest, p: honest(p) if shard_of(p) else (*self.axes, *honest(p))
)
# an all-gather whose backward takes this rank's slice and does not sum (VeOmni pull request 1120)
GatherWithoutTheSum = planted(
    MegatronSP, enter=lambda self, honest, x, weight, bias: project(_SliceForSum.apply(x, self), weight, bias)
)


def _decay_of_first_heads(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Any:
    return honest(q, k, v, mask.of_heads(lambda rates: rates.chunk(self.size)[0].repeat(self.size)))


# every tensor parallel rank takes the decay of the first heads
NestedHeadsWithOneDecay = planted(TP, linear_attention=_decay_of_first_heads)


class _AveragedByRank(Bert):
    def _losses(self, x: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        losses, weights = super()._losses(x, inputs), inputs["loss_weights"]
        mean = losses["mlm_loss"] / (weights.sum() * self.strategy.sequence_parts)
        return {**losses, "mlm_loss": mean, "loss": mean + losses["order_loss"]}


@dataclass(frozen=True)
class LossAveragedByRank(BertModel):
    """Each rank takes the mean over its own masked tokens, and the means are averaged, though ranks have
    unequally many of them (VeOmni pull request 338)."""

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return _AveragedByRank(self, strategy, seq_len, stage)


# DSP's grids


def _place_by_place(self: Any, honest: Any, grid: Grid, from_dim: int | None, to_dim: int) -> Grid:
    """What comes back is put together place by place of each rank, not rank by rank."""
    switched: Grid = honest(grid, from_dim, to_dim)
    if from_dim is None or from_dim == to_dim or grid.sizes[from_dim] % self.size:
        return switched
    cut = from_dim + 1
    x = switched.x.unflatten(cut, (self.size, -1)).transpose(cut, cut + 1).flatten(cut, cut + 1)
    return switched.of(x)


def _padding_attended_to(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
    """The places that a message adds are cut off only after attention."""
    size = q.shape[dim + 1]
    missing = math.ceil(size / self.size) * self.size - size
    at_end = (0, 0) * (q.ndim - 2 - dim) + (0, missing)
    o: Tensor = honest(*(F.pad(x, at_end) for x in (q, k, v)), dim)
    return o.narrow(dim + 1, 0, size)


def _last_places_again(self: Any, honest: Any, x: Tensor, dim: Any) -> Tensor:
    """All ranks are given as many places, the last ones again where there are too few."""
    dim = dim[self.grid_dim] if isinstance(dim, tuple) else dim
    if dim is None:
        return x
    each = math.ceil(x.shape[dim] / self.size)
    places = torch.arange(self.rank * each, (self.rank + 1) * each).clamp(max=x.shape[dim] - 1)
    return x.index_select(dim, places)


def _padded_grid(self: Any, honest: Any, x: Tensor, sizes: Sequence[int]) -> Grid:
    padded = list(sizes)
    padded[self.grid_dim] = math.ceil(sizes[self.grid_dim] / self.size) * self.size
    grid: Grid = honest(x, padded)
    return grid


class _InputSummed(Linear):
    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(collectives.copy_to_group(x, self.group))


class _WeightSummed(Linear):
    group: Any = None

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, collectives.copy_to_group(self.weight, self.group))


def _grouped(cls: Any, **how: Any) -> Callable[..., Linear]:
    def linear(self: Any, honest: Any, in_features: int, out_features: int) -> Linear:
        layer: Linear = cls(in_features, out_features, **how)
        layer.group = self.group  # type: ignore[assignment]
        return layer

    return linear


PartsInWrongOrder = planted(DSP, switch=_place_by_place)
PaddingAttendedTo = planted(DSP, grid_attention=_padding_attended_to)
PaddingInTheLoss = planted(DSP, shard=_last_places_again, grid=_padded_grid)
# the gradient of the text is summed by the layer that reads it, as tensor parallelism has to, and again with
# those of all parameters
TextCountedTwice = planted(DSP, linear_in_text=_grouped(_InputSummed))
# the gradient of a weight is summed in backward, and the sum again with the others
WeightCountedNTimes = planted(DSP, linear_out=_grouped(_WeightSummed, bias=False))
# attention along the dim that is cut, among the places of a rank: nothing is switched
LinesOfOneRankOnly = planted(
    DSP, along=lambda self, honest, grid, *where: grid, restored=lambda self, honest, grid: grid
)
