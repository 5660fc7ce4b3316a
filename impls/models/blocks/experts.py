"""A mixture of experts as a layer's feed-forward block: a router, routed experts, and shared ones.

A token x becomes y = sum of w_e E_e(x) over the token's experts e, plus S(x) or sigmoid(g x) S(x) where there
are shared experts S. Each E_e is an MLP of the model's kind. A rank holds some experts; a dispatcher
(:mod:`spbench.impls.dispatchers`) sends tokens to the ranks of their experts and back.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, T = B L
tokens of this rank, E experts, k experts a token, R rows (tokens at this rank's experts, sorted by expert), F
this rank's features of an expert. ``lengths`` are the rows of each expert.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.dispatchers.dispatcher import (
    BesideDispatch,
    Counts,
    Dispatched,
    Dispatcher,
    ExpertCall,
    all_dispatchers,
)
from spbench.impls.dispatchers.sent_tokens import planned_counts, positions_of
from spbench.impls.kernels.activations import weighted_swiglu
from spbench.impls.kernels.projection import LIBRARIES, project
from spbench.impls.models.blocks.adapter_options import EXPERTS
from spbench.impls.models.blocks.adapters import ExpertAdapters
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.models.blocks.expert_weights import (
    ExpertTensors,
    SeparateExperts,
    StackedExperts,
    shared_bias,
)
from spbench.impls.models.blocks.feed_forward import ACTIVATIONS, FACTORS, FeedForward, MlpModule, mlp_sites
from spbench.impls.models.blocks.recomputation import recomputed, remade
from spbench.impls.models.blocks.router import Routed, Router
from spbench.impls.observed_work import host_works
from spbench.impls.rings import wait_for_device
from spbench.impls.routing import LEARNED
from spbench.impls.row_collectives import gather_flags
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import Linear

#: what Megatron-Core's router and dispatcher cost the host in forward, in calls of a module: the median of
#: 124 of seven runs of scripts/megatron_host.py on a busy machine. The about 25 of backward are not counted
ROUTED_CALLS = 124


class MixtureOfExperts(FeedForward):
    """The kind of feed-forward block with the experts of :class:`ExpertOptions`."""

    closing_bias = False

    def build(self, model: Architecture, strategy: Strategy) -> nn.Module:
        return MixtureModule(model, strategy)

    def sites(self, model: Architecture, batch: int, seq_len: int, again: bool, spared: bool) -> list[Site]:
        dims = {"B": batch, "L": seq_len, "H": model.hidden, "F": model.expert_width}
        dims |= {"E": model.experts, "K": model.experts_per_token}
        dims |= {"adapted": 1} if model.adapts([EXPERTS]) else {}
        again = again or model.recomputes("moe")
        experts = Site("experts", 1, dims, again, call_of(model))
        again = again or model.recomputes("shared_experts")
        once = model.gathers_shared_once
        shared = mlp_sites(model, model.shared_inner, batch, seq_len, again, spared=False, once=once)
        return [experts, *(shared if model.shared_inner else [])]

    def parameters(self, model: Architecture) -> dict[str, int]:
        hidden, features, experts = model.hidden, model.expert_width, model.experts
        opening = model.mlp_projections
        of_expert = (opening + 1) * hidden * features
        if model.expert_biases:
            of_expert += opening * features + hidden
        shared = (opening + 1) * hidden * model.shared_inner
        router = experts * (hidden + model.router_linear_bias)
        return {
            "experts": experts * of_expert,
            "split": shared,
            "mlp": shared,
            "whole": router + hidden * model.shared_gate,
        }


def call_of(model: Architecture) -> ExpertCall:
    """The options of one call of the dispatcher, from the model's options."""
    return ExpertCall(
        model.routing_plan,
        model.dispatcher,
        model.capacity,
        model.capacity_padded,
        model.router_dtype == "float32",
        model.aux_loss,
        model.routing == LEARNED,
        model.node_ranks,
        model.expert_weighting_at,
        model.kept_collectives,
    )


class MixtureModule(nn.Module):
    """The module of router, routed experts and shared experts, x [B, L, H] -> [B, L, H]."""

    gathered_whole = True  # as a leaf module of DeepSpeed's ZeRO-3

    def __init__(self, model: Architecture, strategy: Strategy):
        super().__init__()
        self.model, self.strategy, place = model, strategy, strategy.place
        self.router = Router(model, strategy)
        dispatcher = all_dispatchers()[model.dispatcher]
        self.dispatcher: Dispatcher = dispatcher(place, model.experts, model.permutation, model.node_ranks)
        if model.expert_weighting_at == "tokens":
            self.dispatcher.weighted = "sent" if model.expert_weighting == "input" else "returned"
        if model.library != LIBRARIES[0]:
            # use_global_buffer of Megatron-Core's MoEAllGatherTokenDispatcher
            self.dispatcher.buffer = strategy.buffer
        held = range(model.experts)[self.dispatcher.mine]
        weights = StackedExperts if model.stacked_experts else SeparateExperts
        self.experts: StackedExperts | SeparateExperts = weights(model, strategy, held)
        self.adapters = ExpertAdapters(model, held) if model.adapts([EXPERTS]) else None
        self.shared = MlpModule(model, strategy, model.shared_inner) if model.shared_inner else None
        if self.shared is not None:
            self.shared.project.gathered_once = model.gathers_shared_once
        self.shared_gate = Linear(model.hidden, 1, bias=False) if model.shared_gate else None
        self.call = call_of(model)
        #: the group of ranks that share experts, which gathers counts of tokens
        self.group: dist.ProcessGroup | None = place.group("ep", "etp")
        self._planned: dict[tuple[int, int], Counts] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.model.recomputes("moe"):
            return recomputed(self._whole, self.strategy.random, x)
        return self._whole(x)

    def _whole(self, x: Tensor) -> Tensor:
        batch, here, hidden = x.shape
        length = here * self.strategy.sequence_parts
        tokens = x.reshape(-1, hidden)
        beside, shared = self._beside(x), None
        if beside is not None:
            tokens = self.strategy.side_stream.awaited(tokens)
        elif self.shared is not None:
            shared = self._of_shared(x)
        self.dispatcher.beside = beside
        if self.model.fused:
            host_works(ROUTED_CALLS)
        routed = self.router(tokens, batch, self._forced(batch, length, tokens))
        y = self._of_routed(tokens, routed, batch, length).view(x.shape)
        if beside is not None:
            shared, self.dispatcher.beside = beside.result(), None
        return y if shared is None else y + shared

    def _of_shared(self, x: Tensor) -> Tensor:
        if self.model.recomputes("shared_experts") and not self.model.recomputes("moe"):
            return recomputed(self._gated_shared, self.strategy.random, x)
        return self._gated_shared(x)

    def _gated_shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        y: Tensor = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()

    def _beside(self, x: Tensor) -> BesideDispatch | None:
        """The shared experts for the dispatcher to run; None: no ``shared_overlap``, or no shared experts."""
        shared, gate = self.shared, self.shared_gate
        if shared is None or not self.model.shared_overlap:
            return None

        def opens(x: Tensor) -> tuple[Tensor, ...]:
            gated = () if gate is None else (gate(x).sigmoid(),)
            return (shared.opened(x), *gated)

        def closes(features: Tensor, *gated: Tensor) -> tuple[Tensor]:
            y = shared.closed(features)
            return (y * gated[0] if gated else y,)

        return BesideDispatch(self.strategy.side_stream, x, opens, closes)

    def _of_routed(self, tokens: Tensor, routed: Routed, batch: int, length: int) -> Tensor:
        counts = self._counts(routed.chosen, batch, length)
        there = self.dispatcher.dispatch(tokens, routed.weights, routed.chosen, counts)
        # as in programs, the experts' result lives until the tokens are summed
        made = self._by_experts(there)
        back = self.dispatcher.send_back(made, there.state)
        return self.dispatcher.to_tokens(back, there.state)

    def _by_experts(self, there: Dispatched) -> Tensor:
        rows = self._experts(there.rows, there.weights, there.lengths)
        return self.dispatcher.to_ranks(rows, there.state)

    # -- where tokens go ---------------------------------------------------------------------------------

    def _forced(self, batch: int, length: int, x: Tensor) -> Tensor | None:
        """The experts of each token [T, k] by a forced routing; None: a learned one, or x has no values."""
        if self.model.routing == LEARNED or not has_values(x):
            return None
        positions = positions_of(self.strategy, self.strategy.place, length)
        experts = torch.from_numpy(self.call.plan.of_positions(length)[positions])
        return experts.repeat(batch, 1).to(x.device)

    def _counts(self, chosen: Tensor, batch: int, length: int) -> Counts | None:
        """How many tokens each rank sends to each expert: the ranks gather these counts, or the routing plan
        says them (forced, padded, or no values). None: the dispatcher needs no counts, or gathers choices."""
        parts, padded, counts_of_ranks = self.dispatcher.parts, self.model.capacity_padded, None
        if self.dispatcher.by_counts and not self.dispatcher.gathers_choices and not padded:
            met = [chosen.unflatten(1, (part, -1)).any(2).sum(0) for part in parts]
            counts_of_ranks = gather_flags(torch.cat([chosen.sum(0), *met]), self.group)
            if self.group is not None and self.group.size() > 1:
                wait_for_device(counts_of_ranks)  # the host reads how many rows to receive
        if self.model.routing == LEARNED and has_values(chosen) and not padded:
            if counts_of_ranks is None:
                return None
            ends = np.cumsum([self.model.experts, *parts])
            sent, *others = np.split(counts_of_ranks.view(-1, int(ends[-1])).cpu().numpy(), ends[:-1], axis=1)
            return Counts(sent, others)
        if (batch, length) not in self._planned:
            planned = planned_counts(self.call, self.strategy, batch, length, parts)
            self._planned[batch, length] = planned
        return self._planned[batch, length]

    # -- the experts' computation ------------------------------------------------------------------------

    def _experts(self, x: Tensor, weights: Tensor | None, lengths: Sequence[int]) -> Tensor:
        """The experts' results [R, H] of rows x [R, H], times the rows' weights [R] unless None."""
        if weights is not None and self.model.expert_weighting == "input":
            return self._matmuls(x * weights.to(x.dtype)[:, None], None, lengths)
        return self._matmuls(x, weights, lengths)

    def _matmuls(self, x: Tensor, weights: Tensor | None, lengths: Sequence[int]) -> Tensor:
        if self.model.experts_matmul == "grouped":
            y = self.experts.opened(x, lengths)
            if self.adapters is not None:
                y = self.adapters.opened(y, x, lengths)
            y = self._activated_and(y, weights, lambda activated: self._closed(activated, lengths))
            return self.experts.with_bias(y, lengths, weights)
        parts = x.split([*lengths])
        each = weights.split([*lengths]) if weights is not None else [None] * len(parts)
        adapters = [()] * len(parts) if self.adapters is None else self.adapters.each()
        given = zip(self.experts.each(), parts, each, adapters, strict=True)
        return torch.cat([self._one(*of_one) for of_one in given])

    def _closed(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        y = self.experts.closed(x, lengths)
        return y if self.adapters is None else self.adapters.closed(y, x, lengths)

    def _one(
        self, expert: ExpertTensors, x: Tensor, weights: Tensor | None, factors: tuple[Tensor, ...]
    ) -> Tensor:
        """One expert's results [rows, H] of its rows x [rows, H]; ``factors``: of its adapters, or ()."""

        def projected(x: Tensor, weight: Tensor, bias: Tensor | None, *of_adapter: Tensor) -> Tensor:
            y = project(x, weight, bias)
            if not of_adapter:
                return y
            down, up = of_adapter
            return y + project(project(x, down), up) * self.model.lora_scale

        y = projected(x, expert.opens, expert.opens_bias, *factors[:2])
        y = y.unflatten(-1, expert.opens.shape[:2])
        y = self._activated_and(y, weights, lambda a: projected(a, expert.closes, None, *factors[2:]))
        if expert.closes_bias is None:
            return y
        bias = shared_bias(expert.closes_bias, self.dispatcher.etp)
        return y + (bias if weights is None else bias * weights.to(bias.dtype)[:, None])

    def _activated_and(self, y: Tensor, weights: Tensor | None, use: Callable[[Tensor], Tensor]) -> Tensor:
        """``use(self._activated(y, weights))``; with recompute module moe_act backward activates again."""
        if not self.model.recomputes("moe_act"):
            return use(self._activated(y, weights))
        activated = recomputed(self._activated, self.strategy.random, y, weights)
        given = y.detach(), None if weights is None else weights.detach()
        with remade([activated], lambda: [self._activated(*given)]):
            return use(activated)

    def _activated(self, y: Tensor, weights: Tensor | None) -> Tensor:
        """The activated and gated features [R, F] of y [R, 1 or 2, F], times the weights [R] unless None."""
        model = self.model
        # only torch.compile fuses the clamped SiLU: libraries' kernel for gpt-oss is not modelled
        clamped = model.activation == "clamped_silu" and not model.fused
        fused = model.gated_mlp and (model.activation == "silu" or clamped) and model.fuses("bias_swiglu")
        if fused and weights is not None:
            return weighted_swiglu(y, weights, clamped=clamped)
        gate, *factors = y.unbind(-2)
        y = ACTIVATIONS[model.activation](gate)
        if factors:
            factor = FACTORS.get(model.activation)
            y = y * (factors[0] if factor is None else factor(factors[0]))
        if weights is None:
            return y
        if model.fused:  # Megatron-LM rounds the weighted features, not the weights
            return (y * weights[:, None]).to(y.dtype)
        return y * weights.to(y.dtype)[:, None]


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values, which fake tensors (of virtual ranks) and meta tensors have not."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor) and x.device.type != "meta"
