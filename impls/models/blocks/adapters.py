"""Low-rank adapters beside frozen weights (LoRA, Hu et al., arXiv 2106.09685).

A projection y = W x with an adapter is y = W x + (alpha / r) B A x, with A [r, H] and B [F, r]. A and B alone
are trained: the other weights have no gradient and no state of an optimizer. What only their gradients would
need is not kept, so that the input of a frozen projection is kept for A.

Where a strategy splits features, the factor of an adapter on the split side of its projection is split with
it, and the other one is whole, as in ParallelLinearAdapter of Megatron-Bridge. The r features between the two
are gathered, or summed over ranks, as the projection's own input or output is.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, F features,
r rank of the adapters.

Of a rank's routed experts each has its own: an expert has one adapter for what opens it, gate and all, and
one for what closes it. So have GroupedExpertsLoRA of NeMo Automodel (components/_peft/lora_experts.py), whose
factors stack those of all experts as its weights do, and Megatron-Bridge without share_expert_adapters
(peft/lora.py), with factors an expert. Megatron-Bridge's default, one adapter for all experts of a rank, is
another function on other ranks.

Letters: R rows, n experts of this rank, H hidden, F features of an expert, P its opening projections, 1 or 2,
r rank of the adapters.
"""

from __future__ import annotations

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
    """Weights that are trained where a model has a rank of adapters."""


class DroppingAdapters(Adapters):
    """Adapters whose inputs go through dropout, each adapter's through one of its own."""

    def __init__(self, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.scale, self.p, self.strategy = model.lora_scale, model.lora_dropout, strategy

    def dropped(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """x as A takes it; ``axes``: over which x is spread."""
        return self.strategy.random.dropout(x, self.p, axes)


class OpeningAdapters(DroppingAdapters):
    """Adapters of the projections that open a block, one a projection where each is a matmul of its own, else
    one for all of them together.

    Args:
        names: of the projections, in their order.
        together: builds B of all of them, from r features.
        alone: builds B of the projection with that number, from r features.
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
        #: the numbers of the projections that have one; None: all share one
        self.places = model.adapted_apart(names)
        many = 1 if self.places is None else len(self.places)
        self.down = nn.ModuleList(Linear(features, rank, bias=False) for _ in range(many))
        ups = [together(rank)] if self.places is None else [alone(rank, place) for place in self.places]
        self.up = nn.ModuleList(ups)

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The projections of x [B, L, H] with what their adapters add."""
        results = list(outputs)
        if self.places is None:
            parts: Sequence[Tensor] = self.up[0](self._down(0, x))
            return tuple(y + part * self.scale for y, part in zip(results, parts, strict=True))
        for number, (place, up) in enumerate(zip(self.places, self.up, strict=True)):
            (part,) = up(self._down(number, x))
            results[place] = results[place] + part * self.scale
        return tuple(results)

    def together(self, x: Tensor) -> Tensor:
        """What the one adapter of all projections adds to them side by side [..., groups, F]."""
        up = self.up[0]
        assert isinstance(up, GroupedLinear)
        return up.together(self._down(0, x)) * self.scale

    def _down(self, number: int, x: Tensor) -> Tensor:
        """The r features of x of one of the adapters."""
        features: Tensor = self.down[number](self.dropped(x, self.strategy.position_axes))
        return features


class ClosingAdapter(DroppingAdapters):
    """The adapter of the projection that closes a block: this rank's features of x [B, L, F] -> [B, L, H]."""

    def __init__(
        self, model: DecoderOptions, strategy: Strategy, layers: LayerHooks, features: int, hidden: int
    ):
        super().__init__(model, strategy)
        self.down = layers.linear_out(features, model.lora_rank)
        self.up = Linear(model.lora_rank, hidden, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y, the projection of x, with what the adapter adds."""
        # of features that are split, each rank draws its own
        added: Tensor = self.up(self.down.project(self.dropped(x, self.strategy.attention_axes)))
        return y + added * self.scale


def freeze(module: nn.Module, model: DecoderOptions) -> None:
    """Have the adapters of a module alone trained, if its model has some."""
    if not model.lora_rank:
        return
    adapters = [m for m in module.modules() if isinstance(m, Adapters)]
    trained = {p for adapter in adapters for p in adapter.parameters()}
    whole = {"embedding": "embedding.weight", "head": "head"}
    trained |= {p for name, p in module.named_parameters() if name in map(whole.get, model.lora_whole)}
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in trained)


def beside_adapters(*blocks: nn.Module | None) -> Iterator[nn.Module]:
    """The modules of blocks that are in none of their adapters."""
    modules = [module for block in blocks if block is not None for module in block.modules()]
    adapters = [module for module in modules if isinstance(module, Adapters)]
    adapting = {module for adapter in adapters for module in adapter.modules()}
    return (module for module in modules if module not in adapting)


def with_gradient(x: Tensor, model: DecoderOptions) -> Tensor:
    """Hidden states [B, L, H] behind a frozen embedding, with a gradient, as Hugging Face's
    ``enable_input_require_grads`` has them for activation checkpointing."""
    if model.lora_rank and torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return x


class ExpertAdapters(Adapters):
    """What the adapters of experts add to rows, which lie one expert's after another's: A of what opens an
    expert [r, H] and B [P, F, r], of what closes it [r, F] and [H, r]."""

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
        """One factor of all experts: features -> [*to]."""
        if self.stacked:
            return Stack(len(held), to, features, bias=False)
        *groups, rows = to

        def of_one() -> nn.Module:
            return GroupedLinear(features, rows, *groups) if groups else Linear(features, rows, bias=False)

        return nn.ModuleDict({str(number): of_one() for number in held})

    def each(self) -> list[tuple[Tensor, ...]]:
        """The four factors of the experts one by one, as :class:`ExpertAdapters` lists them."""
        factors = self.opens_down, self.opens_up, self.closes_down, self.closes_up
        return [*zip(*map(_matrices, factors), strict=True)]

    def opened(self, y: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """y [R, P, F], the projections of x [R, H] that open experts, with what adapters add."""
        added = self._through(self.opens_up, self._through(self.opens_down, x, lengths), lengths)
        return y + added.view_as(y) * self.scale

    def closed(self, y: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """y [R, H], the projection of x [R, F] that closes experts, with what adapters add."""
        added = self._through(self.closes_up, self._through(self.closes_down, x, lengths), lengths)
        return y + added * self.scale

    def _through(self, factor: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if isinstance(factor, Stack):
            return stacked_project(x, factor.weight, lengths)
        return grouped_project(x, _parameters(factor), lengths)


def _matrices(factor: nn.Module) -> list[Tensor]:
    """A factor of the experts one by one."""
    if isinstance(factor, Stack):
        return [*factor.weight.unbind()]
    return _parameters(factor)


def _parameters(factor: nn.Module) -> list[Any]:
    assert isinstance(factor, nn.ModuleDict)
    return [each.weight for each in factor.values()]
