"""Low-rank adapters next to frozen weights (LoRA, Hu et al., arXiv 2106.09685).

A projection y = W x with an adapter is y = W x + (alpha / r) B A x, with factors A [r, H] and B [F, r]. Only
A and B are trained: frozen weights have no gradient and no optimizer state. No tensor is kept for a frozen
weight's gradient, so a frozen projection's input is kept only because A needs it.

Where a strategy splits a projection's features, the adapter's factor on the split side is split too, and the
other factor is whole, as in ParallelLinearAdapter of Megatron-Bridge. The r features between the factors are
gathered, or summed over ranks, as the projection's own input or output is.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, F features,
r rank of the adapters.

Each routed expert has two adapters of its own: one for the opening projections, the gate included, and one
for the closing projection. GroupedExpertsLoRA of NeMo Automodel (components/_peft/lora_experts.py) does the
same and stacks the factors of all experts; Megatron-Bridge without share_expert_adapters (peft/lora.py) has
separate factors for each expert. Megatron-Bridge's default, one adapter for all experts of a rank, is not
modelled, because the model would then depend on the number of ranks.

Letters of experts: R rows (tokens at their experts), F features of an expert, P opening projections, 1 or 2.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.grouped_matmul import grouped_project, stacked_project
from spbench.impls.layout import StackShard, mark_expert, mark_shard
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.expert_weights import Stack
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import GroupedLinear, LayerHooks, Linear


class Adapters(nn.Module):
    """A module whose parameters are trained where a model has adapters."""


class DroppingAdapters(Adapters):
    """Adapters each of whose inputs goes through a dropout of its own."""

    def __init__(self, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.scale, self.p, self.strategy = model.lora_scale, model.lora_dropout, strategy

    def dropped(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """x after dropout, the input of factor A; ``axes``: the axes of ranks that split x."""
        return self.strategy.random.dropout(x, self.p, axes)


class OpeningAdapters(DroppingAdapters):
    """The adapters of the projections that open a block: one adapter for each projection where every
    projection is a matmul of its own, else one adapter for all projections.

    Args:
        names: the names of the projections, in their order.
        together: builds factor B of all projections, from r.
        alone: builds factor B of one projection, from r and the projection's index.
    """

    def __init__(
        self,
        model: DecoderOptions,
        strategy: Strategy,
        features: int,
        names: Sequence[str],
        together: Callable[[int], nn.Module],
        alone: Callable[[int, int], nn.Module],
    ):
        super().__init__(model, strategy)
        rank = model.lora_rank
        #: the indices of the projections that have an adapter; None: all projections share one
        self.places = model.adapted_apart(names)
        many = 1 if self.places is None else len(self.places)
        self.down = nn.ModuleList(Linear(features, rank, bias=False) for _ in range(many))
        ups = [together(rank)] if self.places is None else [alone(rank, place) for place in self.places]
        self.up = nn.ModuleList(ups)

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The projections' ``outputs`` of x [B, L, H], each plus its adapter's output."""
        results = list(outputs)
        if self.places is None:
            parts: Sequence[Tensor] = self.up[0](self._down(0, x))
            return tuple(y + part * self.scale for y, part in zip(results, parts, strict=True))
        for number, (place, up) in enumerate(zip(self.places, self.up, strict=True)):
            (part,) = up(self._down(number, x))
            results[place] = results[place] + part * self.scale
        return tuple(results)

    def together(self, x: Tensor) -> Tensor:
        """The output [..., groups, F] of the adapter that all projections share, a group for each."""
        up = self.up[0]
        assert isinstance(up, GroupedLinear)
        return up.together(self._down(0, x)) * self.scale

    def _down(self, number: int, x: Tensor) -> Tensor:
        """The r features [..., r] that factor A of the adapter with this index makes of x."""
        features: Tensor = self.down[number](self.dropped(x, self.strategy.position_axes))
        return features


class ClosingAdapter(DroppingAdapters):
    """The adapter of the projection that closes a block: this rank's features x [B, L, F] -> [B, L, H]."""

    def __init__(
        self, model: DecoderOptions, strategy: Strategy, layers: LayerHooks, features: int, hidden: int
    ):
        super().__init__(model, strategy)
        self.down = layers.linear_out(features, model.lora_rank)
        self.up = Linear(model.lora_rank, hidden, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The projection y of x plus the adapter's output of x [B, L, H]."""
        # where ranks split features, each rank draws a dropout mask for its own features
        added: Tensor = self.up(self.down.project(self.dropped(x, self.strategy.attention_axes)))
        return y + added * self.scale


def freeze(module: nn.Module, model: DecoderOptions) -> None:
    """Freeze all parameters of a module but its adapters' and ``lora_whole``'s, if its model has adapters."""
    if not model.lora_rank:
        return
    adapters = [m for m in module.modules() if isinstance(m, Adapters)]
    trained = {p for adapter in adapters for p in adapter.parameters()}
    whole = {"embedding": "embedding.weight", "head": "head"}
    trained |= {p for name, p in module.named_parameters() if name in map(whole.get, model.lora_whole)}
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in trained)


def beside_adapters(*blocks: nn.Module | None) -> Iterator[nn.Module]:
    """The modules within the blocks, but for adapters and the modules within adapters."""
    modules = [module for block in blocks if block is not None for module in block.modules()]
    adapters = [module for module in modules if isinstance(module, Adapters)]
    adapting = {module for adapter in adapters for module in adapter.modules()}
    return (module for module in modules if module not in adapting)


def with_gradient(x: Tensor, model: DecoderOptions) -> Tensor:
    """The hidden states x [B, L, H] behind a frozen embedding, set to require a gradient, as Hugging Face's
    ``enable_input_require_grads`` does for activation checkpointing."""
    if model.lora_rank and torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return x


class ExpertAdapters(Adapters):
    """The adapters of a rank's experts, for rows that are sorted by expert. An expert has four factors: A
    [r, H] and B [P, F, r] of its opening projections, A [r, F] and B [H, r] of its closing projection."""

    def __init__(self, model: Architecture, held: range):
        super().__init__()
        self.scale, self.stacked = model.lora_scale, model.stacked_experts
        hidden, features, rank = model.hidden, model.expert_width, model.lora_rank
        self.opens_down = self._factor(held, (rank,), hidden)
        self.opens_up = self._factor(held, (model.mlp_projections, features), rank)
        self.closes_down = self._factor(held, (rank,), features)
        self.closes_up = self._factor(held, (hidden,), rank)
        for parameter in self.parameters():
            mark_expert(parameter, stacked=self.stacked)
            if self.stacked and len(held) < model.experts:
                mark_shard(parameter, StackShard("etp", 0, 0, 1, held.start, len(held), model.experts))

    def _factor(self, held: range, to: Sequence[int], features: int) -> nn.Module:
        """A factor of all experts, [features] -> [*to]: a stack, or a module for each expert."""
        if self.stacked:
            return Stack(len(held), to, features, bias=False)
        *groups, rows = to

        def of_one() -> nn.Module:
            return GroupedLinear(features, rows, *groups) if groups else Linear(features, rows, bias=False)

        return nn.ModuleDict({str(number): of_one() for number in held})

    def each(self) -> list[tuple[Tensor, ...]]:
        """The four factors of each expert, in the order that :class:`ExpertAdapters` lists them."""
        factors = self.opens_down, self.opens_up, self.closes_down, self.closes_up
        return [*zip(*map(_matrices, factors), strict=True)]

    def opened(self, y: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """y [R, P, F], the opening projections of x [R, H], plus the adapters' outputs. ``lengths``: the
        numbers of rows of each expert."""
        added = self._through(self.opens_up, self._through(self.opens_down, x, lengths), lengths)
        return y + added.view_as(y) * self.scale

    def closed(self, y: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """y [R, H], the closing projection of x [R, F], plus the adapters' outputs; ``lengths``: rows of each
        expert."""
        added = self._through(self.closes_up, self._through(self.closes_down, x, lengths), lengths)
        return y + added * self.scale

    def _through(self, factor: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if isinstance(factor, Stack):
            return stacked_project(x, factor.weight, lengths)
        return grouped_project(x, _parameters(factor), lengths)


def _matrices(factor: nn.Module) -> list[Tensor]:
    """The matrix of each expert in a factor of all experts."""
    if isinstance(factor, Stack):
        return [*factor.weight.unbind()]
    return _parameters(factor)


def _parameters(factor: nn.Module) -> list[Any]:
    assert isinstance(factor, nn.ModuleDict)
    return [each.weight for each in factor.values()]
