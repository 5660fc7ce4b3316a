"""Verification's oracle runs without any option that changes how, and not what, a model computes."""

from __future__ import annotations

from dataclasses import fields

from spbench.impls.models.model import models

#: options that change what a model computes: sizes, layers, functions
WHAT = {
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "head_size", "inner", "channels", "patch"),
    *("vocabulary", "vocabulary_multiple", "max_positions", "token_types", "text_hidden", "text_tokens"),
    *("time_features", "temporal", "leading", "key_size", "value_size", "state_heads", "state_key_heads"),
    *("convolution", "pattern", "softmax_every", "kind", "window", "sinks", "documents", "documents_seed"),
    *("norm", "norm_epsilon", "pre_norm", "embedding_norm", "qk_norm", "attention_norm", "output_gate"),
    *("norms", "embedding_scaled", "logit_cap", "qk_norm_over", "window_rotary_base"),
    *("mlp", "biases", "qkv_bias", "parallel_residual", "position", "rotary_base", "rotary_share"),
    *("tied", "binary_head", "linformer", "mtp_layers", "mtp_weight"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("lora_rank", "lora_alpha", "lora_targets", "lora_whole", "lora_dropout", "frozen_bits"),
    *("experts", "experts_per_token", "expert_inner", "shared_inner", "shared_gate", "dense_layers"),
    *("expert_pattern", "expert_biases", "expert_weighting", "router", "router_scores", "router_normalized"),
    *("router_scale", "router_groups", "router_group_topk", "router_bias", "router_linear_bias"),
    *("router_dtype", "aux_loss", "aux_weight", "z_weight", "capacity", "capacity_padded", "routing"),
}
#: options that change how, which the oracle may keep, with the reason
HARMLESS = {
    "separate_projections": "names and shapes of parameters differ, which the oracle must share",
    "stacked_experts": "shapes of parameters differ; the oracle multiplies with one expert's after another's",
    "mask_shape": "a shape of the padding mask, which an input has",
    "loader_mask": "a tensor that no operator reads",
    "padded_values": "zeros that add nothing; a variant compares them with gradients of all weights",
    "autotune_copies": "of a compiler that the plain loss does not call",
    "autotune_flush_kib": "of a compiler that the plain loss does not call",
    "autotune_states_kib": "of a buffer beside kernels, that nothing reads",
    "state_processors": "into how many sums backward divides one, which a test of the kernels compares",
    "recompute_method": "of recomputation, which is off",
    "recompute_layers": "of recomputation, which is off",
    "checkpointed_angles": "of checkpoints, which are off",
    "packing_read": "what the host reads beside attention",
    "positions_read": "what the host reads beside the loss",
    "logits_held": "how long a tensor lives that the plain loss has anyway",
    "node_ranks": "of a dispatcher that the oracle does not use",
    "recompute_modules": "of recomputation, which is off",
    **dict.fromkeys(("fp8_history", "fp8_transposes"), "of eight bits, which are off"),
}
#: options of one model
KEPT = {
    ("BertModel", "dropout"): "verification runs without dropout",
    ("AttentionCallModel", "attention"): "decides by which rate the call is timed, not what runs",
}


def test_every_option_is_plain_in_the_oracle_or_said_to_change_what_is_computed() -> None:
    missing = [
        f"{type(model).__name__}.{field.name}"
        for model in models().values()
        for field in fields(model)
        if field.name not in {*model.plain_options, *WHAT, *HARMLESS}
        and (type(model).__name__, field.name) not in KEPT
    ]
    assert missing == []


def test_the_lists_name_options_that_exist() -> None:
    names = {field.name for model in models().values() for field in fields(model)}
    assert {*WHAT, *HARMLESS} <= names
    assert not {*WHAT} & {*HARMLESS}
