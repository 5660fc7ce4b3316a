"""Matmuls in eight bits of accelerate's configuration, by TransformerEngine or torchao (accelerate 1.15,
utils/dataclasses.py: TERecipeKwargs and AORecipeKwargs)."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account

_MIXED, _SECTION = "accelerate.mixed_precision", "accelerate.fp8_config."
_BACKEND, _HISTORY, _ALGORITHM, _FORMAT = (
    f"{_SECTION}{each}" for each in ("backend", "amax_history_len", "amax_compute_algo", "fp8_format")
)


def by_transformer_engine(k: Account) -> bool:
    """Whether its layers are to multiply in eight bits, which accelerate takes where no library is named."""
    return k.value(_MIXED) == "fp8" and str(k.value(_BACKEND)).upper() == "TE"


def set_fp8(k: Account) -> None:
    """Set the recipe of matmuls in eight bits, if a job has one."""
    if k.value(_MIXED) != "fp8":
        k.ignore("of matmuls in eight bits, which the job has not", _BACKEND, _HISTORY, _ALGORITHM, _FORMAT)
        return
    backend = str(k.value(_BACKEND)).upper()
    if backend == "AO":
        k.set("model_options.fp8", "tensorwise", _MIXED, _BACKEND, note="torchao's default recipe")
        because = "all projections of layers are in eight bits, and weights are gathered in sixteen"
        k.leave("time and memory", because, _BACKEND)
    elif backend == "TE":
        k.set("model_options.library", "transformer-engine", _BACKEND)
        k.set("model_options.fp8", "delayed", _MIXED, _BACKEND, note="DelayedScaling")
        if k.value(_ALGORITHM) == "max" and k.value(_HISTORY) > 1:
            k.set("model_options.fp8_history", k.value(_HISTORY), _HISTORY, _ALGORITHM)
        k.ignore("the most recent magnitude makes a scale, by default", _HISTORY, _ALGORITHM)
        if k.value(_FORMAT) != "HYBRID":
            k.leave("nothing", "gradients have another format of eight bits", _FORMAT)
        k.ignore("weights and inputs in E4M3, gradients in E5M2", _FORMAT)
        k.approximate("projections of the same input are one matmul, not a layer each")
    else:
        k.refuse("matmuls in eight bits by another library than TransformerEngine and torchao", _BACKEND)
