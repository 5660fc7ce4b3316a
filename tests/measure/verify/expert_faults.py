"""Models with experts that have a planted fault each, of the kinds that public code has had. On one rank each
is as it should be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spbench.impls.layout import mark_expert
from spbench.impls.models.blocks.experts import MixtureModule
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.strategies.base import Strategy
from tests.measure.verify.planting import planted

Change = Callable[[MixtureModule], None]


def in_each_block(change: Change) -> Callable[..., nn.Module]:
    """A replacement of ``build`` that changes every block of experts, on several ranks alone."""

    def build(self: Any, honest: Any, strategy: Strategy, *sizes: Any) -> nn.Module:
        module: nn.Module = honest(strategy, *sizes)
        for each in module.modules():
            if isinstance(each, MixtureModule) and strategy.size > 1:
                change(each)
        return module

    return build


def _times_ep(block: MixtureModule) -> None:
    for p in block.experts.parameters():
        p.register_hook(lambda gradient: gradient * block.dispatcher.ep)


def _router_as_an_expert(block: MixtureModule) -> None:
    """Its gradient is summed over the ranks that have copies of experts alone."""
    mark_expert(block.router.weight)


def _experts_as_others(block: MixtureModule) -> None:
    """Their gradients are summed over all ranks that spread positions, whatever experts these have."""
    for p in block.experts.parameters():
        p.spbench_expert = False  # type: ignore[attr-defined]


def _own_counts(block: MixtureModule) -> None:
    block.router.group = None


def _of_all_replicas(block: MixtureModule) -> None:
    """The auxiliary loss counts as if each rank that spreads positions were a replica."""
    losses = block.strategy.losses
    losses.replicas = block.strategy.place.size(*block.strategy.position_axes)


def _dropping(block: MixtureModule) -> None:
    """An expert takes no more than a rank's mean tokens, of which nothing is said."""
    honest = block.dispatcher.dispatch
    model = block.model

    def dispatch(x: Tensor, weights: Tensor, chosen: Tensor, sent: np.ndarray | None) -> Any:
        most = len(x) * model.experts_per_token // model.experts
        within = chosen.cumsum(0) <= max(1, most)
        return honest(x, weights * within, chosen, sent)

    block.dispatcher.dispatch = dispatch  # type: ignore[method-assign]


def _tossing(block: MixtureModule) -> None:
    """Every other token goes to the experts of the least scores."""
    honest = block.router.choose
    block.router.choose = lambda scores: honest(scores * (-1) ** torch.arange(len(scores))[:, None])  # type: ignore[method-assign]


# pytorch #160285: twice the gradient at ep 2, as a mean over ranks is taken for one over copies
ExpertGradientsTimesEp = planted(CausalTransformerModel, build=in_each_block(_times_ep))
ExpertGradientsOverAllRanks = planted(CausalTransformerModel, build=in_each_block(_experts_as_others))
RouterGradientNotSummed = planted(CausalTransformerModel, build=in_each_block(_router_as_an_expert))
CountsOfOwnTokens = planted(CausalTransformerModel, build=in_each_block(_own_counts))
AuxiliaryLossOverWrongGroup = planted(CausalTransformerModel, build=in_each_block(_of_all_replicas))
# marin #8754: a fifth of the tokens at long lengths
TokensDroppedInSilence = planted(CausalTransformerModel, build=in_each_block(_dropping))
OtherChoices = planted(CausalTransformerModel, build=in_each_block(_tossing))
