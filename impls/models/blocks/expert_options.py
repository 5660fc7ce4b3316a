"""The options of a decoder whose MLPs are mixtures of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.impls.dispatchers.dispatcher import all_dispatchers
from spbench.impls.kernels.permutation import PERMUTATIONS
from spbench.impls.kernels.projection import LIBRARIES
from spbench.impls.options import check_choices
from spbench.impls.routing import EVEN, LEARNED, RoutingPlan

_CHOICES = {
    "router": ("softmax", "sigmoid", "sinkhorn"),
    "router_scores": ("all", "chosen"),
    "router_dtype": ("float32", "model"),
    "aux_loss": ("none", "batch", "sequence", "global"),
    "expert_weighting": ("output", "input"),
    "expert_weighting_at": ("experts", "tokens"),
    "experts_matmul": ("grouped", "sequential"),
    "permutation": PERMUTATIONS,
}


@dataclass(frozen=True)
class ExpertOptions:
    """The options of routed experts, which replace MLPs: a router sends each token to a few experts.

    Attributes:
        experts: E, routed experts of a layer; 0: none, each layer has an MLP.
        experts_per_token: k, the routed experts that a token goes to.
        expert_inner: width of a routed expert; None: ``inner``.
        shared_inner: width of all shared experts together, which every token goes to; 0: no shared experts.
        shared_gate: whether shared experts have a sigmoid gate, a number a token (Qwen2-MoE, arXiv
            2407.10671).
        shared_overlap: whether shared experts run on a stream of their own while tokens are sent; see
            :mod:`spbench.impls.dispatchers.dispatcher`.
        dense_layers: the number of layers at the beginning that have an MLP.
        expert_pattern: 1 for a layer with experts, 0 for a layer with an MLP, repeated over the layers.
        expert_biases: whether the experts' projections have biases (gpt-oss, arXiv 2508.10925).
        expert_weighting: what the router's weights multiply: an expert's "output", or its "input" (Llama 4).
        expert_weighting_at: where the weights multiply: on the ranks of the "experts", which the weights are
            sent to; or on the ranks of the "tokens", in float32, before or after the exchange (torchtitan).
        router: "softmax", "sigmoid" (DeepSeek-V3, arXiv 2412.19437), or "sinkhorn", a balanced softmax that
            chooses experts without a gradient.
        router_scores: "all": a softmax over all experts, of which the largest are chosen (Qwen3); "chosen":
            a softmax over the logits of the chosen experts (Mixtral, arXiv 2401.04088).
        router_normalized: whether the weights of a token's experts sum to one.
        router_scale: a factor of the weights.
        router_groups, router_group_topk: the number of groups of experts, and of groups that a token may use:
            those with the largest sum of their best k / router_group_topk scores. 0: no groups.
        router_bias: whether a number for each expert, without gradient, is added to the scores that choose
            experts, but not to weights (arXiv 2408.15664).
        router_linear_bias: whether the router's projection has a bias.
        router_dtype: the least precision of the router's projection and scores: "float32", or the "model"'s.
        aux_loss: the tokens over which a loss balances the experts' loads (arXiv 2101.03961): of a "batch"
            (a micro-batch of one replica), a "sequence", or a "global" batch (a micro-batch of all replicas,
            arXiv 2501.11873).
        aux_weight: the weight of that loss's mean over micro-batches.
        z_weight: the weight of the mean square of the logsumexp of the router's logits (arXiv 2202.08906).
        capacity: the most tokens of an expert, a multiple of a rank's mean tokens an expert; None: no limit.
        capacity_padded: whether each expert takes exactly its capacity.
        routing: "learned": the router's choice, for which virtual ranks without values take an even one;
            else a forced choice, see :class:`RoutingPlan`.
        dispatcher: how tokens reach the ranks of their experts, the name of a file of impls/dispatchers.
        node_ranks: the ranks of a node, for dispatchers "node_deduplicated" and "hybrid_ep".
        experts_matmul: "grouped": one call for all experts of a rank; "sequential": a call for each.
        stacked_experts: whether a rank's experts are one parameter, as in torchtitan's GroupedExperts, or
            parameters for each expert, as in Megatron-LM's TEGroupedMLP.
        permutation: one of :data:`PERMUTATIONS`; see :mod:`spbench.impls.kernels.permutation`.
    """

    experts: int = 0
    experts_per_token: int = 2
    expert_inner: int | None = None
    shared_inner: int = 0
    shared_gate: bool = False
    shared_overlap: bool = False
    dense_layers: int = 0
    expert_pattern: Sequence[int] = (1,)
    expert_biases: bool = False
    expert_weighting: str = "output"
    expert_weighting_at: str = "experts"
    router: str = "softmax"
    router_scores: str = "all"
    router_normalized: bool = False
    router_scale: float = 1.0
    router_groups: int = 0
    router_group_topk: int = 0
    router_bias: bool = False
    router_linear_bias: bool = False
    router_dtype: str = "float32"
    aux_loss: str = "none"
    aux_weight: float = 0.0
    z_weight: float = 0.0
    capacity: float | None = None
    capacity_padded: bool = False
    routing: str = LEARNED
    dispatcher: str = "all_to_all"
    node_ranks: int = 8
    experts_matmul: str = "grouped"
    stacked_experts: bool = False
    permutation: str = "plain"

    def check_experts(self) -> None:
        """Raise ValueError for options of experts that contradict each other."""
        object.__setattr__(self, "expert_pattern", tuple(self.expert_pattern))  # a list has no hash
        if not self.experts:
            return
        check_choices(self, {**_CHOICES, "dispatcher": all_dispatchers()})
        if not self.expert_pattern or set(self.expert_pattern) - {0, 1}:
            raise ValueError(f"expert_pattern has 0 and 1, not {self.expert_pattern}")
        if bool(self.router_groups) != bool(self.router_group_topk):
            raise ValueError("router_groups and router_group_topk need each other; set both or none")
        if self.router_groups and (
            self.experts % self.router_groups or self.router_group_topk > self.router_groups
        ):
            raise ValueError(
                f"{self.experts} experts cannot be in {self.router_groups} groups, of which a token meets "
                f"{self.router_group_topk}"
            )
        if self.router_groups:
            met = self.router_group_topk * self.experts // self.router_groups
            if self.experts_per_token > met:
                raise ValueError(
                    f"a token meets the {met} experts of {self.router_group_topk} groups, fewer than "
                    f"experts_per_token {self.experts_per_token}; raise router_group_topk"
                )
        if self.router == "sinkhorn" and (self.aux_loss != "none" or self.router_groups or self.router_bias):
            raise ValueError(
                "router: sinkhorn balances by itself; leave aux_loss, groups and router_bias out"
            )
        if (self.aux_loss == "none") != (self.aux_weight == 0):
            raise ValueError(f"aux_loss {self.aux_loss} with aux_weight {self.aux_weight}; set both or none")
        if not all_dispatchers()[self.dispatcher].heeds_capacity and self.capacity is not None:
            raise ValueError(f"{self.dispatcher} sends every token; leave capacity out, or use all_to_all")
        if self.expert_weighting_at == "tokens" and not all_dispatchers()[self.dispatcher].weighs_tokens:
            raise ValueError(f"{self.dispatcher} sums rows on its way; leave expert_weighting_at out")
        if self.shared_overlap:
            self._check_overlap()
        if self.capacity_padded and self.capacity is None:
            raise ValueError("capacity_padded pads to capacity; set that, or leave it out")
        if self.stacked_experts and self.library != LIBRARIES[0]:  # type: ignore[attr-defined]
            raise ValueError(f"stacked_experts needs library {LIBRARIES[0]}, not {self.library}")  # type: ignore[attr-defined]
        if self.capacity is not None and self.capacity <= 0:
            raise ValueError(f"capacity is above 0, not {self.capacity}")
        _ = self.routing_plan

    def _check_overlap(self) -> None:
        if not self.shared_inner:
            raise ValueError(
                "shared_overlap runs shared experts beside the dispatch; set shared_inner, or leave it out"
            )
        if not all_dispatchers()[self.dispatcher].overlaps:
            able = ", ".join(name for name, each in all_dispatchers().items() if each.overlaps)
            raise ValueError(
                f"shared_overlap needs a dispatcher that sends beside it: {able}; not {self.dispatcher}"
            )
        if self.recomputes("shared_experts"):  # type: ignore[attr-defined]
            raise ValueError(
                "shared_overlap keeps what shared experts save; take shared_experts out of recompute_modules"
            )

    def shrunk_experts(self) -> dict[str, Any]:
        """The options of experts in small sizes, for verification; {} for a model without experts."""
        if not self.experts:
            return {}
        groups = {"router_groups": 4, "router_group_topk": 2} if self.router_groups else {}
        return {
            "experts": 12,
            "experts_per_token": min(self.experts_per_token, 3),
            "expert_inner": 24,
            "shared_inner": 48 if self.shared_inner else 0,
            "dense_layers": min(self.dense_layers, 1),
            **groups,
        }

    def expert_variants(self) -> list[Mapping[str, Any]]:
        """The changes of options of experts that verification tries; see :meth:`Model.variants`."""
        if not self.experts:
            return []
        balanced = {"aux_loss": "sequence", "aux_weight": 0.1}
        groups = {"router_groups": 4, "router_group_topk": 2, "router_bias": True}
        return [
            # DeepSeek-V3's router, shared experts with Qwen's gate, the first layer dense
            {"router": "sigmoid", "router_normalized": True, "router_scale": 2.5, **groups, **balanced}
            | {"shared_inner": 48, "shared_gate": True, "shared_overlap": True, "dense_layers": 1}
            | {"stacked_experts": True},
            # Mixtral's router, with uneven loads, one expert after another
            {"routing": "zipf:1.5", "router_scores": "chosen", "experts_matmul": "sequential"}
            | {"aux_loss": "batch", "aux_weight": 0.1, "z_weight": 0.01},
            {"routing": "even", "dispatcher": "all_gather", "permutation": "fused", "recompute": "full"}
            | {"library": "transformer-engine", "aux_loss": "global", "aux_weight": 0.1},
            # all tokens go to the same three experts, so that other experts have none. Without z_weight the
            # router's gradient would be zero but for rounding
            {"routing": "zipf:40", "permutation": "fused", "library": "transformer-engine"}
            | {"recompute": "selective", "recompute_modules": ("moe_act", "shared_experts", "layernorm")}
            | {"shared_inner": 24, "z_weight": 0.01},
            # Llama 4's router, in every second layer
            {
                "experts_per_token": 1,
                "router": "sigmoid",
                "router_normalized": False,
                "expert_weighting": "input",
                "expert_weighting_at": "tokens",
            }
            | {"expert_pattern": (0, 1), "shared_inner": 48},
            {"mlp": "clamped_swiglu", "expert_biases": True, "router_linear_bias": True}
            | {
                "permutation": "indexed",
                "expert_weighting_at": "tokens",
                "recompute": "operators",
                "recompute_keeps": ("all_to_all",),
            },
        ]

    @property
    def expert_width(self) -> int:
        """The inner features of one routed expert."""
        return self.expert_inner or self.inner  # type: ignore[attr-defined]

    @property
    def gathers_shared_once(self) -> bool:
        """Whether a strategy that gathers the input of shared experts keeps the input whole for backward, as
        Megatron-Core does with shared_overlap (parallel_mode None)."""
        return self.shared_overlap and self.fp8 == "none"  # type: ignore[attr-defined]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of an MLP."""
        pattern = self.expert_pattern
        return bool(self.experts) and layer >= self.dense_layers and bool(pattern[layer % len(pattern)])

    @property
    def routing_plan(self) -> RoutingPlan:
        """The experts that tokens go to: by ``routing``, or evenly spread where the router learns."""
        routing = EVEN if self.routing == LEARNED else self.routing
        groups = self.router_groups, self.router_group_topk
        return RoutingPlan(routing, self.experts, self.experts_per_token, *groups)
