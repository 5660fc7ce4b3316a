"""Jobs of ms-swift by Megatron-Core: a script that starts `megatron sft` or `megatron pt`, whose options are
Megatron-LM's arguments with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.adapter_settings import Adapted, set_adapters
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import program_launch, values_of_launch
from spbench.bench.tools.jobs.megatron import make_settings, megatron_account
from spbench.bench.tools.jobs.model_names import named_model
from spbench.bench.tools.jobs.rules import Said
from spbench.bench.tools.jobs.step_lines import named_modules
from spbench.bench.tools.jobs.underscored import as_arguments, job_of_both


def read(files: JobFiles) -> Job | None:
    """A job of ms-swift by Megatron-Core; None if the script starts no such tuning. UserError if the
    script cannot be read, or has several such commands."""
    table, problems = argument_table("swift_megatron"), list[str]()
    if (launch := program_launch(files, table.content["launch"])) is None:
        return None
    values, _ = values_of_launch(launch, table.content, table, problems)
    own = key_account(table, [(n, v) for n, v in values.items() if n in table.arguments])
    fields = _fields(own, problems)
    known = {**table.content["defaults"], **_sizes(table.content, fields, problems), **values}
    known |= {"seq_length": own.value("max_length"), "max_position_embeddings": own.value("max_length")}
    if known.get("recompute_granularity") == "none":
        known["recompute_granularity"] = None
    of_megatron = {n: v for n, v in known.items() if n not in table.arguments}
    megatron = megatron_account(
        dict(as_arguments(of_megatron, values, problems, "ms-swift")), launch.environment
    )
    gpus = files.gpus or launch.gpus
    if not problems and not own.problems:
        make_settings(megatron, gpus, files.cluster)
    megatron.ignore("how many processes there are", *table.content["launch"]["processes"].split())
    own.took("the model's sizes", "model")
    own.took("seq_len", "max_length")
    rank = own.value("lora_rank") if own.value("tuner_type") == "lora" else 0
    adapted = Adapted(*(named_modules(own, name) for name in ("target_modules", "modules_to_save")))
    lora = Said(rank, own.given_of("tuner_type", "lora_rank"))
    set_adapters(own, lora, fields, adapted, separate=False, experts="each")
    own.problems[:0] = problems
    return job_of_both("swift_megatron", files, gpus, values, megatron, own)


def _fields(own: Account, problems: list[str]) -> Mapping[str, Any]:
    """The fields of the model's config.json; empty, and a problem, if the model is not known. The name of a
    converted model is that of its original, with the ending ``-mcore``."""
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


def _sizes(content: Mapping[str, Any], fields: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The arguments of Megatron-LM by key that follow from a config.json's ``fields``; empty, and a problem,
    for a model of another family than those in ``content``, the program's table."""
    families: Mapping[str, Mapping[str, Any]] = content["families"]
    family = fields.get("model_type")
    if family is None:
        return {}
    if family not in families:
        advice = "spbench fit MODEL takes it by its name on Hugging Face, with --set for the layout"
        problems.append(f"model: model_type {family} is none of {', '.join(families)}; {advice}")
        return {}
    sizes = {key: fields[field] for field, key in content["sizes"].items() if fields.get(field) is not None}
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
        sizes["qk_layernorm"] = True
    groups = {"group_query_attention": True} if "num_query_groups" in sizes else {}
    tied = {"untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False)}
    return {**families[family], **sizes, **experts, **groups, **tied}
