"""Adapters of low rank (LoRA) in a job, as settings of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.transformers_step import EXPERTS, Said
from spbench.impls.models.blocks import adapter_options

#: fields of a config.json that show linear attention, whose adapters are not modelled
LINEAR_ATTENTION = ("linear_num_key_heads", "mamba_num_heads")


def set_adapters(
    k: Account, lora: Said, fields: Mapping[str, Any], *, separate: bool = True, experts: str = "frozen"
) -> None:
    """Set the adapters of a job: a rank for all linear layers, but for those of linear attention, which are
    frozen alone.

    Args:
        lora: the rank; 0: there are no adapters.
        fields: of the model's config.json.
        separate: queries, keys and values, and the inputs of an MLP, are layers of their own, with adapters
            each.
        experts: "frozen": routed experts have none, as they are no linear layers in transformers 5; "each"
            has its own; "shared": those of a rank share one, which is not modelled.
    """
    if not lora.value:
        k.ignore("all weights are trained", *lora.names)
        return
    if type(lora.value) is not int or lora.value < 0:
        k.problems.append(f"{' and '.join(map(k.spelled, lora.names))}: no rank of adapters")
        return
    fields = {**fields, **fields.get("text_config", {})}
    routed = any(map(fields.get, EXPERTS))
    k.set("model_options.lora_rank", lora.value, *lora.names)
    if routed and experts == "each":
        targets = [adapter_options.ALL, adapter_options.EXPERTS]
        k.set("model_options.lora_targets", targets, note="each routed expert has adapters")
    if separate:
        k.set("model_options.separate_projections", True, note="each linear layer has adapters of its own")
    shared, linear = routed and experts == "shared", any(map(fields.get, LINEAR_ATTENTION))
    if lacking := ["experts that share one"] * shared + ["linear attention"] * linear:
        because = "they are frozen here; 16 r (F + H) bytes of each matrix that is adapted are missing"
        k.stand_in(f"adapters (LoRA) of {' and '.join(lacking)}", "time and memory", because, *lora.names)
