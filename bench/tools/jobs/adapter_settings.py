"""Adapters of low rank (LoRA) in a job, as settings of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.transformers_step import EXPERTS, Said
from spbench.impls.models.blocks.adapter_options import CLOSING, MLP_CLOSING, OPENING, PROJECTIONS, QKV

#: what has no adapters here, fields of a config.json that show it, and the projections that are then left
_WITHOUT = {
    "experts": (EXPERTS, (*QKV, CLOSING)),
    "latent attention": (("kv_lora_rank",), (CLOSING, *OPENING, MLP_CLOSING)),
    "linear attention": (("linear_num_key_heads", "mamba_num_heads"), PROJECTIONS),
}


def set_adapters(k: Account, lora: Said, fields: Mapping[str, Any]) -> None:
    """Set the adapters of a job: a rank for all linear layers of attention and MLPs, but for those whose
    adapters are not modelled, which are frozen alone.

    Args:
        lora: the rank; 0: there are no adapters.
        fields: of the model's config.json.
    """
    if not lora.value:
        k.ignore("all weights are trained", *lora.names)
        return
    if type(lora.value) is not int or lora.value < 0:
        k.problems.append(f"{' and '.join(map(k.spelled, lora.names))}: no rank of adapters")
        return
    fields = {**fields, **fields.get("text_config", {})}
    k.set("model_options.lora_rank", lora.value, *lora.names)
    lacking = {what: left for what, (names, left) in _WITHOUT.items() if any(map(fields.get, names))}
    targets = [name for name in PROJECTIONS if all(name in left for left in lacking.values())]
    if len(targets) < len(PROJECTIONS):
        k.set("model_options.lora_targets", targets, note=f"{' and '.join(lacking)} have no adapters here")
    if {*QKV} & {*targets}:
        k.set("model_options.separate_projections", True, note="each linear layer has adapters of its own")
    if lacking:
        because = "they are frozen here; 16 r (F + H) bytes of each matrix that is adapted are missing"
        k.stand_in(f"adapters (LoRA) of {' and '.join(lacking)}", "time and memory", because, *lora.names)
