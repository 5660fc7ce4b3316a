"""Activations of MLPs without a gate, as config.json names them."""

from __future__ import annotations

from spbench.impls.models.huggingface.config import not_covered

#: keys of :data:`MLPS` by transformers' names
MLPS = {
    "gelu": "erf_gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}


def mlp_of(field: str, activation: str) -> str:
    """The MLP without a gate that has an activation.

    Raises:
        ValueError: there is none; names the ``field``.
    """
    if activation not in MLPS:
        raise not_covered(field, activation, f"activations here are {', '.join(MLPS)}")
    return MLPS[activation]
