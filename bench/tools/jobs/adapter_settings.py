"""Adapters of low rank (LoRA) in a job, as settings of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.transformers_step import EXPERTS, Said

#: fields of a config.json of models whose adapters are not modelled, and what these have
_WITHOUT = {
    "experts": EXPERTS,
    "latent attention": ("kv_lora_rank",),
    "linear attention": ("linear_num_key_heads", "mamba_num_heads"),
}
#: bytes beside a weight of half precision that is trained: a gradient, a float32 master and two moments
_TRAINED = 2 + 12


def set_adapters(k: Account, lora: Said, fields: Mapping[str, Any], *, on_host: bool = False) -> None:
    """Set the adapters of a job: a rank for all linear layers of attention and MLPs. For a model whose
    adapters are not modelled, say that all its weights are trained.

    Args:
        lora: the rank; 0: there are no adapters.
        fields: of the model's config.json.
        on_host: the optimizer's state is there.
    """
    if not lora.value:
        k.ignore("all weights are trained", *lora.names)
        return
    if type(lora.value) is not int or lora.value < 0:
        k.problems.append(f"{' and '.join(map(k.spelled, lora.names))}: no rank of adapters")
        return
    fields = {**fields, **fields.get("text_config", {})}
    lacking = next((what for what, names in _WITHOUT.items() if any(map(fields.get, names))), None)
    if lacking is None:
        k.set("model_options.lora_rank", lora.value, *lora.names)
        k.set("model_options.separate_projections", True, note="each linear layer has adapters of its own")
        return
    because = (
        f"all weights are trained here: {_TRAINED} bytes a weight of gradients and optimizer, over the ranks "
        f"and on the {'host' if on_host else 'device'}, and a third of the matmuls, of weights' gradients, "
        "are too much"
    )
    missing = f"adapters (LoRA) of a model with {lacking}"
    k.stand_in(missing, "time and memory", because, *lora.names)
