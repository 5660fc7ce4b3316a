"""What is said of a config.json whose layers have experts or latent attention, which no model here has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: fields that say how many experts a layer has, how many a token meets, and the features of each
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MET = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_FEATURES = ("moe_intermediate_size", "intermediate_size")
#: the preset that is the model with one MLP of what a token meets, by model_type
_PRESETS = {
    "qwen3_next": "qwen3-next-dense",
    "minimax": "minimax-01-dense",
    "minimax_text_01": "minimax-01-dense",
}
#: the family here that is another without its experts
_DENSE = {"qwen3_moe": "qwen3", "qwen2_moe": "qwen2", "mixtral": "mistral"}


def why_not(content: Mapping[str, Any]) -> str:
    """The parts of a model that no model here has, and the dense one to take in its place; "" where its
    fields name no such part."""
    inner = content.get("text_config")
    fields = {**content, **inner} if isinstance(inner, Mapping) else content
    if not (parts := [*_parts(fields)]):
        return ""
    return f"its layers have {' and '.join(parts)}, which no model here has{_stand_in(fields)}"


def _parts(fields: Mapping[str, Any]) -> Iterator[str]:
    if name := _counted(fields, _EXPERTS):
        yield f"a mixture of experts (MoE: {name} = {fields[name]})"
    if _counted(fields, ("kv_lora_rank",)):
        yield f"multi-head latent attention (MLA: kv_lora_rank = {fields['kv_lora_rank']})"


def _stand_in(fields: Mapping[str, Any]) -> str:
    family = fields.get("model_type")
    if family in _PRESETS:
        return f"; the preset {_PRESETS[family]} is it with one MLP of what a token meets"
    met, features = _counted(fields, _MET), _counted(fields, _FEATURES)
    if family not in _DENSE or met is None or features is None:
        return ""
    shared = fields.get("shared_expert_intermediate_size") or 0
    size = fields[met] * fields[features] + (shared if type(shared) is int else 0)
    return (
        f'; for the work of a token, not the memory of its weights, take model_type "{_DENSE[family]}" with '
        f"intermediate_size {size}, what the {fields[met]} experts that it meets have"
    )


def _counted(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these fields that has a whole number of more than one."""
    return next((name for name in names if type(fields.get(name)) is int and fields[name] > 1), None)
