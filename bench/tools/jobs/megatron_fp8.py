"""Matmuls in eight bits of a Megatron-LM job, by TransformerEngine's recipes."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_kernels import card_of

_FORMAT, _RECIPE = "--fp8-format", "--fp8-recipe"
_GATHERED, _REUSED = "--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"
_IN_BF16 = ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
#: of scales from the largest magnitudes of earlier steps
_HISTORY = ("--fp8-margin", "--fp8-interval", "--fp8-amax-history-len", "--fp8-amax-compute-algo")
_OTHERS = ("--fp8-quantizer-factory", "--no-fp8-wgrad", "--fp8-output-proj", "--keep-fp8-transpose-cache")
#: recipes with one scale a tensor, and the generation of cards from which on these need no transposed copies
_WHOLE, _ANY_LAYOUT = ("tensorwise", "delayed"), 10


def set_fp8(a: Account, cluster: str | None) -> None:
    """Set the recipe of matmuls in eight bits, if a job has one; refuse those that are not modelled."""
    if not a.has(_FORMAT):
        names = _RECIPE, _GATHERED, _REUSED, *_IN_BF16, *_HISTORY, *_OTHERS
        a.ignore("of matmuls in 8 bits, which the job has not", *names)
        return
    recipe = a.value(_RECIPE)
    if recipe == "custom":
        _refuse(a, "matmuls in 8 bits with a recipe in Python", _RECIPE)
        return
    if a.value("--transformer-impl") == "local":
        _refuse(a, "matmuls in 8 bits without TransformerEngine")
        return
    if a.value("--num-experts") and recipe == "delayed":
        recipe = _without_history(a)
    a.set("model_options.fp8", recipe, _FORMAT, _RECIPE)
    whole = recipe in _WHOLE
    if whole and card_of(cluster)[1] >= _ANY_LAYOUT:
        a.set("model_options.fp8_transposes", False, note="matmuls of Blackwell read either layout")
    _set_history(a, recipe)
    a.refuse_given("gradients of weights in sixteen bits beside matmuls in eight: not modelled", _OTHERS[1])
    a.leave("time", "the head is in sixteen bits", _OTHERS[2])
    a.ignore("of Megatron-FSDP", _OTHERS[3])
    a.ignore("of a recipe in Python", _OTHERS[0])
    if whole and a.has(_GATHERED) and a.has("--use-distributed-optimizer"):
        a.set("training.fp8_param_gather", True, _GATHERED)
    because = "weights are kept and gathered in sixteen bits, and cast in a step's first micro-batch"
    a.leave("memory and time", because, _GATHERED, _REUSED)
    if a.value(_IN_BF16[0]):
        a.leave("memory and time", "the first and the last layers are in eight bits too", *_IN_BF16)
    else:
        a.ignore(f"of {_IN_BF16[0]}", *_IN_BF16[1:])


def _without_history(a: Account) -> str:
    """The recipe that stands for delayed scaling in a model with experts."""
    because = "each cast looks for the largest magnitude of its matrix first, as with --fp8-recipe tensorwise"
    a.stand_in("scales of experts from earlier steps", "time", because, _FORMAT, _RECIPE)
    a.leave("time", because, *_HISTORY)
    return _WHOLE[0]


def _set_history(a: Account, recipe: str) -> None:
    """Set of how many passes a scale heeds the magnitudes."""
    margin, interval, length, algorithm = _HISTORY
    if recipe != "delayed":
        a.ignore("of scales from earlier steps", *_HISTORY)
        return
    if a.value(algorithm) == "max" and a.value(length) > 1:
        a.set("model_options.fp8_history", a.value(length), length, algorithm)
    a.ignore("the most recent magnitude makes a scale, by default", length, algorithm)
    a.leave("nothing", "a power of two in each scale", margin)
    a.ignore("TransformerEngine sets scales in each pass", interval)
    if a.value(_IN_BF16[0]):
        a.problems.append(f"{_IN_BF16[0]} does not go with --fp8-recipe delayed, in Megatron-LM too")


def _refuse(a: Account, missing: str, *names: str) -> None:
    """Refuse eight bits by what is missing, and with them what is said of them."""
    a.refuse(missing, _FORMAT, *names)
    a.refuse_given(f"{missing}: not modelled", _RECIPE, _GATHERED, _REUSED, *_IN_BF16, *_HISTORY, *_OTHERS)
