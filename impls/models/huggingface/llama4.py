"""Llama 4 (``Llama4ForCausalLM``): the text model, from a file of its own or a file for text and images."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from spbench.impls.models.huggingface.config import WithImagesConfig
from spbench.impls.models.huggingface.llama import LlamaConfig
from spbench.impls.models.huggingface.mixtral import balanced, layers_with_experts


class Llama4TextConfig(LlamaConfig):
    """Llama 4's layers: Llama's, with a shared expert and routed experts, whose inputs the router weighs, in
    each ``interleave_moe_layer_step``-th layer; other layers have an MLP of ``intermediate_size_mlp``.

    The model leaves out that three of four layers attend within chunks of ``attention_chunk_size`` positions
    (the same up to that length), that the fourth has no RoPE, and norms of queries and keys without weights.
    """

    name: ClassVar[str] = "llama4_text"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {**LlamaConfig.fixed, "router_jitter_noise": [0]}
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "attention_chunk_size",
            "attn_scale",
            "attn_temperature_tuning",
            "cache_implementation",
            "floor_scale",
            "for_llm_compressor",
            "layer_types",
            "no_rope_layer_interval",
            "no_rope_layers",
            "output_router_logits",
            "use_qk_norm",
        }
    )

    vocab_size: PositiveInt = 202048
    hidden_size: PositiveInt = 5120
    intermediate_size: PositiveInt = 8192
    intermediate_size_mlp: PositiveInt = 16384
    num_hidden_layers: PositiveInt = 48
    num_attention_heads: PositiveInt = 40
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    num_local_experts: PositiveInt = 16
    num_experts_per_tok: PositiveInt = 1
    interleave_moe_layer_step: PositiveInt = 1
    moe_layers: Sequence[NonNegativeInt] | None = None
    router_aux_loss_coef: NonNegativeFloat = 0.001
    rope_theta: PositiveFloat = 500_000.0
    rms_norm_eps: PositiveFloat = 1e-5

    def family_options(self) -> dict[str, Any]:
        layers, step = self.num_hidden_layers, self.interleave_moe_layer_step
        flags = [(i + 1) % step == 0 for i in range(layers)]
        if self.moe_layers is not None:
            flags = [i in self.moe_layers for i in range(layers)]
        options = {
            "experts": self.num_local_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_weighting": "input",
            "shared_inner": self.intermediate_size,
            "router": "sigmoid",
            **layers_with_experts(flags),
            **balanced(self.router_aux_loss_coef),
        }
        if not all(flags):
            options |= {"inner": self.intermediate_size_mlp, "expert_inner": self.intermediate_size}
        return options


class Llama4Config(WithImagesConfig):
    """Llama 4 for text and images, of which the model has the text part."""

    name: ClassVar[str] = "llama4"

    text_config: Llama4TextConfig
