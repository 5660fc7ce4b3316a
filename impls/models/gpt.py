"""GPT-3 (Brown et al., arXiv 2005.14165) as Megatron-LM trains this model: layer norms before each half of a
layer, learned positions, biases, GELU, dropout, a head that shares the weights of the word embedding."""

from collections.abc import Mapping
from typing import Any

from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.causal_transformer import CausalTransformerModel

_GPT: Mapping[str, Any] = {
    "norm": "layer",
    "mlp": "gelu",
    "biases": True,
    "position": "learned",
    "tied": True,
    "vocabulary": 50257,  # GPT-2's
    "vocabulary_multiple": 128,  # Megatron-LM's make-vocab-size-divisible-by
    "norm_epsilon": 1e-5,
    "cross_entropy": "fused",
}
_DROPOUT: Mapping[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}  # Megatron-LM's defaults

PRESETS = {
    # Megatron-LM's examples/gpt3/train_gpt3_345m; 354.9e6 parameters
    "gpt3-345m": CausalTransformerModel(
        **_GPT, **_DROPOUT, layers=24, hidden=1024, heads=16, inner=4096, max_positions=1024
    ),
    # arXiv 2005.14165, table 2.1: "GPT-3 6.7B" and "GPT-3 175B"
    "gpt3-7b": CausalTransformerModel(**_GPT, **_DROPOUT, layers=32, hidden=4096, heads=32, inner=16384),
    "gpt3-175b": CausalTransformerModel(**_GPT, **_DROPOUT, layers=96, hidden=12288, heads=96, inner=49152),
    # for verification, without dropout, because dropout's masks depend on the layout of tensors
    "gpt3-tiny": CausalTransformerModel(**{**_GPT, **TINY_SIZES, "vocabulary_multiple": 1}, max_positions=64),
}
