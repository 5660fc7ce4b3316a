"""Matmuls in eight bits of accelerate's configuration, by TransformerEngine or torchao (accelerate 1.15,
utils/dataclasses.py: TERecipeKwargs and AORecipeKwargs)."""

from __future__ import annotations

from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.transformers_step import Said

_MIXED, _SECTION = "accelerate.mixed_precision", "accelerate.fp8_config."
_BACKEND, _HISTORY, _ALGORITHM, _FORMAT = (
    f"{_SECTION}{each}" for each in ("backend", "amax_history_len", "amax_compute_algo", "fp8_format")
)


def fp8_of(k: Account) -> dict[str, Any]:
    """The fields ``fp8`` and ``library`` of a step; accelerate takes TransformerEngine where no library is
    named."""
    if k.value(_MIXED) != "fp8":
        k.ignore("of matmuls in eight bits, which the job has not", _BACKEND, _HISTORY, _ALGORITHM, _FORMAT)
        return {}
    backend = str(k.value(_BACKEND)).upper()
    if backend == "AO":
        because = "all projections of layers are in eight bits, and weights are gathered in sixteen"
        k.leave("time and memory", because, _BACKEND)
        return {"fp8": Said("tensorwise", (_MIXED, _BACKEND), "torchao's default recipe")}
    if backend != "TE":
        k.refuse("matmuls in eight bits by another library than TransformerEngine and torchao", _BACKEND)
        return {}
    if k.value(_ALGORITHM) == "max" and k.value(_HISTORY) > 1:
        k.set("model_options.fp8_history", k.value(_HISTORY), _HISTORY, _ALGORITHM)
    k.ignore("the most recent magnitude makes a scale, by default", _HISTORY, _ALGORITHM)
    if k.value(_FORMAT) != "HYBRID":
        k.leave("nothing", "gradients have another format of eight bits", _FORMAT)
    k.ignore("weights and inputs in E4M3, gradients in E5M2", _FORMAT)
    fp8 = Said("delayed", (_MIXED, _BACKEND), "DelayedScaling")
    return {"fp8": fp8, "library": Said("transformer-engine", (_BACKEND,))}
