"""Mixtures of experts on several ranks compute what one device does by torch's own operators."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from tests.impls.models.mixture_runs import Setting, worst_of_rank

TWICE = {"dispatcher": "node_deduplicated", "permutation": "fused"}
HYBRID = {"dispatcher": "hybrid_ep", "permutation": "fused"}
#: torchtitan's
KEPT = {
    "recompute": "operators",
    "recompute_keeps": ("all_to_all",),
    "expert_weighting_at": "tokens",
    "expert_biases": True,
    "router_linear_bias": True,
}
EVEN = {"routing": "even"}
BESIDE = {"shared_inner": 48, "shared_gate": True, "shared_overlap": True, "routing": "zipf:1.5"}
#: a weight that is normalized alone would be 1, and have no gradient
ONE_EXPERT = {"routing": "zipf:40", "experts_per_token": 1, "router_normalized": False}


def balanced(kind: str) -> dict[str, Any]:
    return {"aux_loss": kind, "aux_weight": 0.5, "z_weight": 0.01, "router": "sigmoid"}


SETTINGS = {
    "ep over sp": Setting({"sp": 2, "ep": 2}, options=EVEN),
    "learned": Setting({"sp": 4, "ep": 4}),
    "learned, ep over dp and sp": Setting({"dp": 2, "sp": 2, "ep": 4}),
    "edp": Setting({"dp": 2, "sp": 2, "ep": 2}, options={"routing": "zipf:1.5"}),
    "etp": Setting({"sp": 4, "ep": 2, "etp": 2}, options={"routing": "zipf:1.5"}),
    "learned etp": Setting({"sp": 4, "etp": 4}, options={"experts": 8}),
    "all_gather": Setting({"sp": 4, "ep": 2, "etp": 2}, options={"dispatcher": "all_gather"}),
    # all tokens to the same three experts of one rank: the others have none
    "one rank has all": Setting({"sp": 4, "ep": 4}, options={"routing": "zipf:40", "permutation": "fused"}),
    "one expert has all": Setting({"sp": 2, "ep": 2}, options=ONE_EXPERT),
    "balanced by batch": Setting({"dp": 2, "sp": 2, "ep": 4}, options=balanced("batch"), micro_batches=2),
    "balanced by sequence": Setting(
        {"dp": 2, "sp": 2, "ep": 2}, options={**balanced("sequence"), "router_bias": True}, micro_batches=2
    ),
    "balanced over replicas": Setting({"dp": 2, "sp": 2, "ep": 2}, options=balanced("global")),
    "once a rank": Setting({"sp": 4, "ep": 2, "etp": 2}, options={**TWICE, "routing": "zipf:1.5"}),
    "once a node": Setting({"sp": 4, "ep": 4}, options={**TWICE, "node_ranks": 2, "routing": "zipf:1.5"}),
    "once a node, learned": Setting({"dp": 2, "sp": 2, "ep": 4}, options={**TWICE, "node_ranks": 2}),
    "gathered choices": Setting(
        {"sp": 4, "ep": 4}, options={**HYBRID, "node_ranks": 2, "routing": "zipf:1.5"}
    ),
    "gathered choices, learned": Setting({"dp": 2, "sp": 2, "ep": 4}, options={**HYBRID, "node_ranks": 2}),
    "gathered choices under etp": Setting({"sp": 4, "ep": 2, "etp": 2}, options={**HYBRID, **EVEN}),
    "biases under etp": Setting(
        {"sp": 4, "ep": 2, "etp": 2},
        options={
            "expert_biases": True,
            "mlp": "clamped_swiglu",
            "router_linear_bias": True,
            "routing": "even",
        },
    ),
    "stacked": Setting({"sp": 2, "ep": 2}, options={"stacked_experts": True, "routing": "zipf:40"}),
    "stacked biases under etp": Setting(
        {"sp": 4, "ep": 2, "etp": 2},
        options={"stacked_experts": True, "expert_biases": True, "mlp": "clamped_swiglu"},
    ),
    "shared experts beside it": Setting({"sp": 4, "ep": 4}, options=BESIDE),
    "shared experts beside it, tp": Setting(
        {"tp": 2, "sp": 2, "ep": 4}, "megatron_sp+ring_attention", options={**BESIDE, **TWICE}
    ),
    "zigzag": Setting({"sp": 4, "ep": 2}, "ring_attention", options={"routing": "zipf:1.5"}, zigzag=True),
    # what reduce-scatters bring is kept too
    "kept, weighed by tokens": Setting({"sp": 4, "ep": 2, "etp": 2}, options={**KEPT, "routing": "zipf:1.5"}),
    "kept, weighed by tokens before": Setting(
        {"sp": 2, "ep": 2}, options={**KEPT, "expert_weighting": "input", "recompute_keeps": ()}
    ),
    "tp": Setting(
        {"tp": 2, "sp": 2, "ep": 4}, "megatron_sp+ring_attention", options={"permutation": "fused"}
    ),
}


#: others that meet what they do are in the slow run
ALWAYS = (
    *("learned, ep over dp and sp", "edp", "learned etp", "all_gather", "one rank has all"),
    *(
        "balanced by sequence",
        "balanced over replicas",
        "once a node",
        "gathered choices",
        "biases under etp",
        "kept, weighed by tokens",
        "tp",
    ),
)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=() if name in ALWAYS else pytest.mark.slow)
        for name, setting in SETTINGS.items()
    ],
)
def test_gradients_and_bytes_equal_one_device(pool: RankPool, setting: Setting) -> None:
    found = pool.run(setting.sizes, worst_of_rank, setting)
    for error, name, unlike in found:
        assert error < 1e-10, name
        assert not unlike, unlike
