"""Jobs of ms-swift by Megatron-Core: a script that starts `megatron sft` or `megatron pt`, whose options are
Megatron-LM's arguments with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.adapter_settings import set_adapters
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import options_of
from spbench.bench.tools.jobs.megatron import make_settings, megatron_account
from spbench.bench.tools.jobs.model_names import named_model
from spbench.bench.tools.jobs.swift import PROCESSES, gpus_of, named_modules, tuning_of
from spbench.bench.tools.jobs.transformers_step import Adapted, Said
from spbench.bench.tools.jobs.underscored import as_arguments, outcomes
from spbench.bench.tools.jobs.variables import variables

#: by a field of config.json: Megatron-LM's argument
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "partial_rotary_factor": "rotary_percent",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "n_routed_experts": "num_experts",
    "scoring_func": "moe_router_score_function",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_QK_NORM: Mapping[str, Any] = {"qk_layernorm": True}
_BIASED: Mapping[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_LATENT: Mapping[str, Any] = {"multi_latent_attention": True, **_QK_NORM}
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen2_moe": {"add_qkv_bias": True, "moe_shared_expert_gate": True},
    "qwen3": _QK_NORM,
    "qwen3_moe": _QK_NORM,
    "glm4_moe": {"add_qkv_bias": True, "rotary_percent": 0.5, **_BIASED},
    "glm4_moe_lite": {**_LATENT, **_BIASED},
    "deepseek_v3": {**_LATENT, **_BIASED},
    "kimi_k2": {**_LATENT, **_BIASED},
}


def read(files: JobFiles) -> Job | None:
    """A job of ms-swift by Megatron-Core; None where the script starts no tuning of its.

    Raises:
        UserError: the script cannot be read, or has several such commands.
    """
    if (launch := tuning_of(files, "megatron")) is None:
        return None
    table, problems = argument_table("swift_megatron"), list[str]()
    values = dict(options_of(launch.arguments[1:], table, problems))
    own = key_account(table, [(n, v) for n, v in values.items() if n in table.arguments])
    fields = _fields(own, problems)
    known = {**table.content["defaults"], **_sizes(fields, problems), **values}
    known |= {"seq_length": own.value("max_length"), "max_position_embeddings": own.value("max_length")}
    if known.get("recompute_granularity") == "none":
        known["recompute_granularity"] = None
    of_megatron = {n: v for n, v in known.items() if n not in table.arguments}
    a = megatron_account(dict(as_arguments(of_megatron, values, problems, "ms-swift")), launch.environment)
    gpus = files.gpus or gpus_of(launch)
    if not problems and not own.problems:
        make_settings(a, gpus, files.cluster)
    a.ignore("how many processes there are", *PROCESSES)
    own.took("the model's sizes", "model")
    own.took("seq_len", "max_length")
    rank = own.value("lora_rank") if own.value("tuner_type") == "lora" else 0
    adapted = Adapted(*(named_modules(own, name) for name in ("target_modules", "modules_to_save")))
    lora = Said(rank, own.given_of("tuner_type", "lora_rank"))
    set_adapters(own, lora, fields, adapted, separate=False, experts="each")
    a.problems[:0] = [*problems, *own.problems]
    a.settings += own.settings
    a.remarks += own.remarks
    arguments = [*outcomes(values, a, own), *variables(a)]
    return replace(a, table=table).job("swift_megatron", files, arguments, files.machine_problems(gpus))


def _fields(own: Account, problems: list[str]) -> Mapping[str, Any]:
    """The fields of the model's config.json; none, and a problem, where it is not known. Converted ones
    have the name of those that they were made of, with an ending."""
    name, key = own.chosen("model", "load", "mcore_model")
    if not name:
        problems.append(
            "which model it is is not said; write --model NAME, as on Hugging Face, in the script"
        )
        return {}
    try:
        named = named_model(str(name).rstrip("/").removesuffix("-mcore"))
    except UserError as error:
        problems.append(f"{key}: {error}; or write --model NAME, as on Hugging Face, in the script")
        return {}
    named.account(own, key)
    own.took("the model's weights", *own.given_of("load", "mcore_model"))
    return named.fields


def _sizes(fields: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The arguments that a model's config.json stands for."""
    family = fields.get("model_type")
    if family is None:
        return {}
    if family not in _FAMILIES:
        advice = "spbench fit MODEL takes it by its name on Hugging Face, with --set for the layout"
        problems.append(f"model: model_type {family} is none of {', '.join(_FAMILIES)}; {advice}")
        return {}
    sizes = {key: fields[field] for field, key in _SIZES.items() if fields.get(field) is not None}
    experts = (
        {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"} if "num_experts" in sizes else {}
    )
    if each := fields.get("n_shared_experts"):
        sizes["moe_shared_expert_intermediate_size"] = each * fields["moe_intermediate_size"]
    if (dense := fields.get("first_k_dense_replace")) and experts:
        sizes["moe_layer_freq"] = f"([0]*{dense}+[1]*{fields['num_hidden_layers'] - dense})"
    if (fields.get("n_group") or 1) > 1:
        sizes |= {"moe_router_num_groups": fields["n_group"], "moe_router_group_topk": fields["topk_group"]}
    if "kv_lora_rank" in fields:
        sizes.pop("num_query_groups", None)
    if fields.get("use_qk_norm"):
        sizes |= _QK_NORM
    groups = {"group_query_attention": True} if "num_query_groups" in sizes else {}
    tied = {"untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False)}
    return {**_FAMILIES[family], **sizes, **experts, **groups, **tied}
