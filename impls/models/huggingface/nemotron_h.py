"""Nemotron-H (``NemotronHForCausalLM``, arXiv 2504.03624): Mamba-2, softmax attention, MLPs, by a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt

from spbench.impls.models.huggingface.config import Config, not_covered
from spbench.impls.models.hybrid import HybridModel


class NemotronHConfig(Config):
    """Layers of Mamba-2 (M), softmax attention without positions (*) and MLPs of squared ReLU (-), each with
    a norm of its own, in the order of ``hybrid_override_pattern``. Layers of experts (E) are refused."""

    name: ClassVar[str] = "nemotron_h"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "attention_bias": [False],
        "attention_dropout": [0],
        "hidden_act": ["relu2"],
        "hidden_dropout": [0],
        "mamba_hidden_act": ["silu"],
        "mamba_proj_bias": [False],
        "mlp_bias": [False],
        "mlp_hidden_act": ["relu2"],
        "residual_in_fp32": [False],
        "use_bias": [False],
        "use_conv_bias": [True],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "chunk_size",
            "expand",  # of the inner width that heads and their size say
            "head_dim",  # as attention_head_dim
            "layer_norm_epsilon",
            "mamba_dt_init_floor",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
            "sliding_window",  # null in all that are published
            "time_step_floor",
            "time_step_limit",
            "time_step_max",
            "time_step_min",
            "use_mamba_kernels",
        }
    )

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    hybrid_override_pattern: str
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    attention_head_dim: PositiveInt
    mamba_num_heads: PositiveInt
    mamba_head_dim: PositiveInt
    n_groups: PositiveInt
    ssm_state_size: PositiveInt
    conv_kernel: PositiveInt = 4
    rms_norm_eps: PositiveFloat = 1e-5
    tie_word_embeddings: bool = False

    def model(self) -> HybridModel:
        pattern, heads = self.hybrid_override_pattern, self.num_attention_heads
        if others := sorted(set(pattern) - set("M*-")):
            why = (
                "E is a layer of experts, which no model here has"
                if "E" in others
                else "a letter is M, * or -"
            )
            raise not_covered("hybrid_override_pattern", pattern, why)
        if len(pattern) != self.num_hidden_layers:
            raise not_covered("num_hidden_layers", self.num_hidden_layers, "the pattern has another number")
        if pattern.startswith("-") or "--" in pattern:
            raise not_covered("hybrid_override_pattern", pattern, "an MLP here comes after a layer of M or *")
        return HybridModel(
            pattern=pattern.replace("*", "S"),
            layers=sum(letter != "-" for letter in pattern),
            hidden=self.hidden_size,
            heads=heads,
            kv_heads=None if self.num_key_value_heads == heads else self.num_key_value_heads,
            head_dim=None if self.attention_head_dim == self.hidden_size / heads else self.attention_head_dim,
            inner=self.intermediate_size,
            mlp="squared_relu",
            position="none",
            vocabulary=self.vocab_size,
            tied=self.tie_word_embeddings,
            norm_epsilon=self.rms_norm_eps,
            state_heads=self.mamba_num_heads,
            state_key_heads=self.n_groups,
            key_size=self.ssm_state_size,
            value_size=self.mamba_head_dim,
            convolution=self.conv_kernel,
        )
