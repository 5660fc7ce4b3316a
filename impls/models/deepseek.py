"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), and Moonlight (arXiv 2502.16982), which has V3's
layers: latent attention, routed and shared experts, and multi-token prediction.

DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5 (arXiv 2602.15763) have V3's layers, and an indexer that chooses
the positions to attend to.
"""

from collections.abc import Mapping
from typing import Any

from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.softmax_options import TINY_INDEX, TINY_LATENT
from spbench.impls.models.causal_transformer import CausalTransformerModel

#: the options that all presets share: the sizes of a head, and a loss that balances experts by sequence
_ALL: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "aux_loss": "sequence",
    "aux_weight": 0.001,
}
#: the balance by a bias alone, as the config.json of V3.2 and GLM-5 have it
_BY_BIAS: Mapping[str, Any] = {"aux_loss": "none", "aux_weight": 0.0}
#: V2's options; its router takes the largest softmax scores, without normalising them
_V2: Mapping[str, Any] = {**_ALL, "vocabulary": 102400, "experts_per_token": 6, "dense_layers": 1}
#: V3's options: sigmoid scores, and a bias of the choice that balances the load
_V3: Mapping[str, Any] = {**_ALL, "router": "sigmoid", "router_bias": True, "router_normalized": True}
_V3_671B: Mapping[str, Any] = {
    **_V3,
    "layers": 61,
    "hidden": 7168,
    "heads": 128,
    "q_lora_rank": 1536,
    "inner": 18432,
    "vocabulary": 129280,
    "experts": 256,
    "experts_per_token": 8,
    "expert_inner": 2048,
    "shared_inner": 2048,
    "dense_layers": 3,
    "router_groups": 8,
    "router_group_topk": 4,
    "router_scale": 2.5,
    "mtp_layers": 1,
}

PRESETS = {
    # deepseek-ai/DeepSeek-V2-Lite's and DeepSeek-V2's config.json
    "deepseek-v2-lite": CausalTransformerModel(
        **_V2,
        layers=27,
        hidden=2048,
        heads=16,
        inner=10944,
        experts=64,
        expert_inner=1408,
        shared_inner=2 * 1408,
    ),
    "deepseek-v2": CausalTransformerModel(
        **_V2,
        layers=60,
        hidden=5120,
        heads=128,
        q_lora_rank=1536,
        inner=12288,
        experts=160,
        expert_inner=1536,
        shared_inner=2 * 1536,
        router_groups=8,
        router_group_topk=3,
        router_scale=16.0,
    ),
    # deepseek-ai/DeepSeek-V3's config.json
    "deepseek-v3": CausalTransformerModel(**_V3_671B),
    # deepseek-ai/DeepSeek-V3.2's config.json
    "deepseek-v3.2": CausalTransformerModel(**{**_V3_671B, **_BY_BIAS}, index_n_heads=64),
    # zai-org/GLM-5's config.json
    "glm-5": CausalTransformerModel(
        **{**_V3, **_BY_BIAS, "qk_nope_head_dim": 192, "v_head_dim": 256},
        layers=78,
        hidden=6144,
        heads=64,
        q_lora_rank=2048,
        index_n_heads=32,
        inner=12288,
        vocabulary=154880,
        rotary_base=1_000_000.0,
        norm_epsilon=1e-5,
        experts=256,
        experts_per_token=8,
        expert_inner=2048,
        shared_inner=2048,
        dense_layers=3,
        router_scale=2.5,
        mtp_layers=1,
    ),
    # moonshotai/Moonlight-16B-A3B's config.json
    "moonlight-16b-a3b": CausalTransformerModel(
        **_V3,
        layers=27,
        hidden=2048,
        heads=16,
        inner=11264,
        vocabulary=163840,
        rotary_base=50_000.0,
        norm_epsilon=1e-5,
        experts=64,
        experts_per_token=6,
        expert_inner=1408,
        shared_inner=2 * 1408,
        dense_layers=1,
        router_scale=2.446,
    ),
    # for verification: latent attention, and a module of multi-token prediction
    "mla-tiny": CausalTransformerModel(**TINY_SIZES, **TINY_LATENT, mtp_layers=1),
    # the same, with an indexer
    "indexer-tiny": CausalTransformerModel(**TINY_SIZES, **TINY_LATENT, **TINY_INDEX, mtp_layers=1),
}
