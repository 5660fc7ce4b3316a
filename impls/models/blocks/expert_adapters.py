"""Low-rank adapters of a rank's routed experts, each with its own.

An expert has one adapter for what opens it, gate and all, and one for what closes it. So have
GroupedExpertsLoRA of NeMo Automodel (components/_peft/lora_experts.py), whose factors stack those of all
experts as its weights do, and Megatron-Bridge without share_expert_adapters (peft/lora.py), with factors an
expert. Megatron-Bridge's default, one adapter for all experts of a rank, is another function on other ranks.

Letters: R rows, n experts of this rank, H hidden, F features of an expert, P its opening projections, 1 or 2,
r rank of the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spbench.impls.kernels.grouped_matmul import grouped_project, stacked_project
from spbench.impls.layout import StackShard, mark_expert, mark_shard
from spbench.impls.models.blocks.adapters import Adapters
from spbench.impls.models.blocks.expert_weights import Stack
from spbench.impls.strategies.layers import GroupedLinear, Linear

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel


class ExpertAdapters(Adapters):
    """What the adapters of experts add to rows, which lie one expert's after another's: A of what opens an
    expert [r, H] and B [P, F, r], of what closes it [r, F] and [H, r]."""

    def __init__(self, model: DecoderModel, held: range):
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
