"""The weights of a rank's routed experts, and their matmuls.

Programs hold the weights in two ways. Megatron-LM's TEGroupedMLP and SequentialMLP have parameters for each
expert (:class:`SeparateExperts`). torchtitan's GroupedExperts has one parameter for all experts of a rank
(:class:`StackedExperts`), which FSDP gathers, and an optimizer updates, as one tensor.

Letters: R rows (tokens at this rank's experts, sorted by expert), n experts of this rank, H hidden, F this
rank's features of an expert, P opening projections, 1 or 2. ``lengths`` are the rows of each expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spbench.impls.kernels.fp8_grouped import grouped_project_fp8
from spbench.impls.kernels.grouped_matmul import add_grouped_bias, grouped_project, stacked_project
from spbench.impls.kernels.operator import differentiable
from spbench.impls.layout import Shard, StackShard, mark_expert, mark_shard
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import GroupedLinear, Linear


class ExpertTensors(NamedTuple):
    """The weights of one expert: ``opens`` [P, F, H], ``closes`` [H, F], and their biases or None."""

    opens: Tensor
    opens_bias: Tensor | None
    closes: Tensor
    closes_bias: Tensor | None


class Expert(nn.Module):
    """The weights of one routed expert, or of this rank's part of its features: ``opens`` [P, F, H] and
    ``closes`` [H, F], with biases or without."""

    def __init__(self, model: Architecture, strategy: Strategy):
        super().__init__()
        place = strategy.place
        parts, index = place.size("etp"), place.rank("etp")
        features, bias = model.expert_width // parts, model.expert_biases
        self.opens = GroupedLinear(model.hidden, features, model.mlp_projections, bias=bias)
        self.closes = Linear(features, model.hidden, bias=bias)
        for parameter in self.parameters():
            mark_expert(parameter)
        if parts > 1:
            for parameter in (*self.opens.parameters(), self.closes.weight):
                mark_shard(parameter, Shard("etp", 1, index, parts))


class SeparateExperts(nn.ModuleDict):
    """A rank's experts with parameters for each, by the expert's number."""

    def __init__(self, model: Architecture, strategy: Strategy, held: range):
        super().__init__({str(number): Expert(model, strategy) for number in held})
        self.parts = strategy.place.size("etp")

    @property
    def _experts(self) -> list[Expert]:
        return [expert for expert in self.values() if isinstance(expert, Expert)]

    def each(self) -> list[ExpertTensors]:
        """The weights of each expert."""
        return [
            ExpertTensors(e.opens.weight, e.opens.bias, e.closes.weight, e.closes.bias) for e in self._experts
        ]

    def opened(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Rows x [R, H] of experts with that many each -> [R, P, F]."""
        y = self._project(x, [each.opens.weight for each in self._experts], lengths)
        biases = [each.opens.bias.flatten() for each in self._experts if each.opens.bias is not None]
        y = add_grouped_bias(y, biases, lengths) if biases else y
        return y.unflatten(-1, self._experts[0].opens.weight.shape[:2])

    def closed(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[R, F] -> [R, H], without the bias."""
        return self._project(x, [each.closes.weight for each in self._experts], lengths)

    def _project(self, x: Tensor, weights: Sequence[nn.Parameter], lengths: Sequence[int]) -> Tensor:
        if (recipe := getattr(weights[0], "spbench_fp8", None)) is not None:
            return grouped_project_fp8(x, weights, lengths, recipe)
        return grouped_project(x, weights, lengths)

    def with_bias(self, y: Tensor, lengths: Sequence[int], weights: Tensor | None) -> Tensor:
        """y [R, H] plus the closing bias, if any, times the weight [R] of each row (None: 1)."""
        biases = [each.closes.bias for each in self._experts if each.closes.bias is not None]
        shared = [shared_bias(bias, self.parts) for bias in biases]
        return add_grouped_bias(y, shared, lengths, weights) if shared else y


class Stack(nn.Module):
    """The weights of n experts in one parameter [n, ..., in_features], and a bias [n, ...] or None."""

    bias: nn.Parameter | None

    def __init__(self, experts: int, features: Sequence[int], in_features: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, *features, in_features))
        self.bias = nn.Parameter(torch.zeros(experts, *features)) if bias else None


class StackedExperts(nn.Module):
    """A rank's experts in one parameter for each matmul: ``opens`` [n, P, F, H] and ``closes`` [n, H, F]."""

    def __init__(self, model: Architecture, strategy: Strategy, held: range):
        super().__init__()
        place, hidden, bias = strategy.place, model.hidden, model.expert_biases
        self.parts, index = place.size("etp"), place.rank("etp")
        features = model.expert_width // self.parts
        self.opens = Stack(len(held), (model.mlp_projections, features), hidden, bias)
        self.closes = Stack(len(held), (hidden,), features, bias)
        for parameter in self.parameters():
            mark_expert(parameter, stacked=True)
            parts = 1 if parameter is self.closes.bias else self.parts
            if parts > 1 or len(held) < model.experts:
                at = held.start, len(held), model.experts
                mark_shard(parameter, StackShard("etp", 2 * (parts > 1), index % parts, parts, *at))

    def each(self) -> list[ExpertTensors]:
        """The weights of each expert, as views of the stacks."""
        opens, closes = self.opens, self.closes
        biases = [None] * len(opens.weight) if opens.bias is None else opens.bias.unbind()
        last = [None] * len(closes.weight) if closes.bias is None else closes.bias.unbind()
        parts = zip(opens.weight.unbind(), biases, closes.weight.unbind(), last, strict=True)
        return [ExpertTensors(*of_one) for of_one in parts]

    def opened(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Rows x [R, H] of experts with that many each -> [R, P, F]."""
        y = stacked_project(x, self.opens.weight, lengths)
        if self.opens.bias is not None:
            y = add_grouped_bias(y, self.opens.bias.flatten(1).unbind(), lengths)
        return y.unflatten(-1, self.opens.weight.shape[1:3])

    def closed(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[R, F] -> [R, H], without the bias."""
        return stacked_project(x, self.closes.weight, lengths)

    def with_bias(self, y: Tensor, lengths: Sequence[int], weights: Tensor | None) -> Tensor:
        """y [R, H] plus the closing bias, if any, times the weight [R] of each row (None: 1)."""
        if self.closes.bias is None:
            return y
        return add_grouped_bias(y, shared_bias(self.closes.bias, self.parts).unbind(), lengths, weights)


#: (bias, parts) -> what each of ``parts`` ranks adds of the bias; backward gives each the whole gradient
shared_bias = differentiable(lambda bias, parts: bias / parts, lambda d_bias: d_bias, lambda *_: ())
