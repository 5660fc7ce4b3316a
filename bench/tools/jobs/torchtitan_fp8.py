"""Matmuls in eight bits of torchtitan's jobs, which torchao makes of linear layers."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account

#: converters that make linear layers multiply in eight bits, by their names in the versions
_LINEAR = ("float8", "quantize.linear.float8")
_SWITCH, _CONVERTERS = "float8.enable_float8_linear", "model.converters"
_SECTIONS = ("quantize.linear.float8", "float8")
#: which torchtitan reads where layers are converted
_KEYS = (
    *("recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather"),
    *("precompute_float8_dynamic_scale_for_fsdp", "scaling_type_input", "scaling_type_weight"),
    "scaling_type_grad_output",
)


def set_fp8(k: Account, *, experts: bool) -> None:
    """Set the recipe of matmuls in eight bits, if a job has them; refuse other converters.

    Args:
        experts: the model has some, beside which no layer is in eight bits here.
    """
    keys = _keys(k)
    if _SWITCH in k.program_arguments:
        converted, switch = k.value(_SWITCH), _SWITCH
    else:
        converted, switch = k.value(_CONVERTERS), _CONVERTERS
        if [each for each in converted if each not in _LINEAR]:
            k.refuse("what converters make of layers (matmuls in eight bits of another kind)", switch)
            return
    if not converted:
        k.ignore("no layer is converted to matmuls in eight bits", *keys.values())
        return
    if experts:
        because = "all matmuls are in sixteen bits, which take up to twice as long"
        k.stand_in(
            "linear layers in eight bits beside experts in torchao", "time and memory", because, switch
        )
        k.ignore("no layer is in eight bits", *keys.values())
        return
    recipe = keys.get("recipe_name")
    name = (k.value(recipe) if recipe else None) or "tensorwise"
    k.set("model_options.fp8", name, switch, *([recipe] if recipe else []))
    for each in filter(k.has, (name for key, name in keys.items() if key.startswith("scaling_type"))):
        if k.value(each) == "delayed":
            k.refuse("scales from earlier steps in torchao", each)
        k.took("scales of the tensor itself", each)
    _leave(k, keys)


def _keys(k: Account) -> dict[str, str]:
    """The keys of a job's version, by their last part."""
    names = ((key, f"{section}.{key}") for section in _SECTIONS for key in _KEYS)
    return {key: name for key, name in names if name in k.program_arguments}


def _leave(k: Account, keys: dict[str, str]) -> None:
    """Say what is not modelled of them."""
    if (filtered := keys.get("filter_fqns")) is not None:
        if k.value(filtered) == ["output"]:
            k.took("the head stays as it is", filtered)
        else:
            because = "each projection of a layer is in eight bits, and the head is not"
            k.stand_in("a choice of layers for eight bits", "time", because, filtered)
    gathered = keys["enable_fsdp_float8_all_gather"]
    if k.value(gathered):
        k.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    k.ignore("each cast of a weight computes its scale", keys["precompute_float8_dynamic_scale_for_fsdp"])
