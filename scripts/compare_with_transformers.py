"""Losses of tiny models from config.json beside those of Hugging Face's transformers with the same weights.

Needs transformers, which the project does not depend on: `pip install transformers` in an environment of this
project, then `python scripts/compare_with_transformers.py`. For each family it builds both models in float64,
copies transformers' weights into ours, runs one batch, and prints the larger of two relative
differences, of a token's loss and of the squared gradient of all weights; it exits with 1 if one is above
LIMIT. (transformers makes RoPE's angles in float32.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.models.huggingface.config import model_from_config
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype

BATCH, LENGTH = 2, 12
LIMIT = 1e-6

_SIZES = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_SIZES, "intermediate_size": 80, "num_key_value_heads": 2}
#: fields of a tiny config.json of each family
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "sliding_window": 5, "head_dim": 16},
    "qwen2": _LLAMA,
    "qwen3": {
        **_LLAMA,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {
        "vocab_size": 96,
        "n_positions": 32,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "gpt_neox": {**_SIZES, "intermediate_size": 192, "rotary_pct": 0.5},
    "bert": {
        **_SIZES,
        "intermediate_size": 192,
        "max_position_embeddings": 32,
        # what the model here has
        "hidden_act": "gelu_new",
        "pad_token_id": None,  # whose embedding has no gradient there
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    },
}


def grouped(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Rows of queries, keys and values [heads x A, ...] group by group, as :class:`GroupedQueryLinear`."""
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, 1)


def of_llama(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of Llama, Mistral, Qwen2 and Qwen3 by our names."""
    kv_heads, ours = config.num_key_value_heads, {}
    ours["embedding.weight"] = theirs["model.embed_tokens.weight"]
    ours["norm.weight"] = theirs["model.norm.weight"]
    ours["head"] = theirs["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"model.layers.{i}."
        ours[own + "mixer_norm.weight"] = theirs[other + "input_layernorm.weight"]
        ours[own + "mlp_norm.weight"] = theirs[other + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            names = [f"{other}self_attn.{p}_proj.{kind}" for p in "qkv"]
            if names[0] in theirs:
                ours[own + f"mixer.project.{kind}"] = grouped(*(theirs[name] for name in names), kv_heads)
        ours[own + "mixer.out.weight"] = theirs[other + "self_attn.o_proj.weight"]
        for norm in ("q_norm", "k_norm"):
            ours[own + f"mixer.{norm}"] = theirs.get(other + f"self_attn.{norm}.weight", torch.empty(0))
        mlp = [theirs[other + f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
        ours[own + "mlp.project.weight"] = torch.stack(mlp)
        ours[own + "mlp.out.weight"] = theirs[other + "mlp.down_proj.weight"]
    return ours


def _layer(own: str, other: str, names: Mapping[str, str], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {own + ours: theirs[other + name] for ours, name in names.items()}


def of_gpt2(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of GPT-2 by our names; its projections are transposed."""
    ours = {
        "embedding.weight": theirs["transformer.wte.weight"],
        "positions.weight": theirs["transformer.wpe.weight"],
    }
    ours |= _layer("norm.", "transformer.ln_f.", {"weight": "weight", "bias": "bias"}, theirs)
    for i in range(config.n_layer):
        own, other = f"blocks.{i}.", f"transformer.h.{i}."
        for ours_norm, norm in (("mixer_norm.", "ln_1."), ("mlp_norm.", "ln_2.")):
            ours |= _layer(own + ours_norm, other + norm, {"weight": "weight", "bias": "bias"}, theirs)
        qkv = {"weight": theirs[other + "attn.c_attn.weight"].mT, "bias": theirs[other + "attn.c_attn.bias"]}
        for kind, together in qkv.items():
            ours[own + f"mixer.project.{kind}"] = grouped(*together.chunk(3), config.n_head)
        ours[own + "mixer.out.weight"] = theirs[other + "attn.c_proj.weight"].mT
        ours[own + "mixer_end.bias"] = theirs[other + "attn.c_proj.bias"]
        ours[own + "mlp.project.weight"] = theirs[other + "mlp.c_fc.weight"].mT
        ours[own + "mlp.project.bias"] = theirs[other + "mlp.c_fc.bias"]
        ours[own + "mlp.out.weight"] = theirs[other + "mlp.c_proj.weight"].mT
        ours[own + "mlp_end.bias"] = theirs[other + "mlp.c_proj.bias"]
    return ours


def of_gpt_neox(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of GPT-NeoX by our names; its queries, keys and values lie head by head, as ours."""
    ours = {
        "embedding.weight": theirs["gpt_neox.embed_in.weight"],
        "head": theirs["embed_out.weight"] if "embed_out.weight" in theirs else theirs["lm_head.weight"],
    }
    ours |= _layer("norm.", "gpt_neox.final_layer_norm.", {"weight": "weight", "bias": "bias"}, theirs)
    names = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mixer_norm.bias": "input_layernorm.bias",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.bias": "post_attention_layernorm.bias",
        "mixer.out.weight": "attention.dense.weight",
        "mixer_end.bias": "attention.dense.bias",
        "mlp.project.weight": "mlp.dense_h_to_4h.weight",
        "mlp.project.bias": "mlp.dense_h_to_4h.bias",
        "mlp.out.weight": "mlp.dense_4h_to_h.weight",
        "mlp_end.bias": "mlp.dense_4h_to_h.bias",
    }
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"gpt_neox.layers.{i}."
        ours |= _layer(own, other, names, theirs)
        for kind in ("weight", "bias"):
            qkv = theirs[other + f"attention.query_key_value.{kind}"]
            ours[own + f"mixer.project.{kind}"] = qkv.unflatten(0, (config.num_attention_heads, -1))
    return ours


def of_bert(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of BERT by our names; our queries, keys and values lie head by head."""
    names = {
        "embeddings.words.weight": "bert.embeddings.word_embeddings.weight",
        "embeddings.positions.weight": "bert.embeddings.position_embeddings.weight",
        "embeddings.types.weight": "bert.embeddings.token_type_embeddings.weight",
        "embeddings.norm.weight": "bert.embeddings.LayerNorm.weight",
        "embeddings.norm.bias": "bert.embeddings.LayerNorm.bias",
        "head.dense.weight": "cls.predictions.transform.dense.weight",
        "head.dense.bias": "cls.predictions.transform.dense.bias",
        "head.norm.weight": "cls.predictions.transform.LayerNorm.weight",
        "head.norm.bias": "cls.predictions.transform.LayerNorm.bias",
        "head.bias": "cls.predictions.bias",
        "pooler.weight": "bert.pooler.dense.weight",
        "pooler.bias": "bert.pooler.dense.bias",
        "order.weight": "cls.seq_relationship.weight",
        "order.bias": "cls.seq_relationship.bias",
    }
    ours = _layer("", "", names, theirs)
    layer = {
        "attention.out.weight": "attention.output.dense.weight",
        "attention_end.bias": "attention.output.dense.bias",
        "attention_end.norm.weight": "attention.output.LayerNorm.weight",
        "attention_end.norm.bias": "attention.output.LayerNorm.bias",
        "mlp_in.weight": "intermediate.dense.weight",
        "mlp_in.bias": "intermediate.dense.bias",
        "mlp_out.weight": "output.dense.weight",
        "mlp_end.bias": "output.dense.bias",
        "mlp_end.norm.weight": "output.LayerNorm.weight",
        "mlp_end.norm.bias": "output.LayerNorm.bias",
    }
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"bert.encoder.layer.{i}."
        ours |= _layer(own, other, layer, theirs)
        for kind in ("weight", "bias"):
            qkv = [theirs[other + f"attention.self.{p}.{kind}"] for p in ("query", "key", "value")]
            ours[own + f"attention.qkv.{kind}"] = grouped(*qkv, config.num_attention_heads).flatten(0, 1)
    return ours


WEIGHTS: Mapping[str, Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), of_llama),
    "gpt2": of_gpt2,
    "gpt_neox": of_gpt_neox,
    "bert": of_bert,
}


def transformers_model(family: str) -> tuple[nn.Module, Any]:
    """transformers' own tiny model of a family in float64, and its configuration."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **TINY[family])
    config._attn_implementation = "eager"
    cls = transformers.BertForPreTraining if family == "bert" else transformers.AutoModelForCausalLM
    make = cls if family == "bert" else cls.from_config
    torch.manual_seed(0)
    model = make(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, config


def difference(family: str) -> float:
    """The largest relative difference of a token's loss, and of the gradient of all weights."""
    theirs, config = transformers_model(family)
    model = model_from_config({"model_type": family, **TINY[family]})
    with default_dtype(torch.float64):
        ours = model.build(Strategy(), LENGTH)
    weights = WEIGHTS[family](dict(theirs.state_dict()), config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name].reshape(parameter.shape))
    inputs = model.inputs(BATCH, LENGTH, torch.Generator().manual_seed(1))
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    found = ours(inputs)
    found["token_loss"].sum().backward()
    expected = transformers_losses(theirs, inputs)
    expected.sum().backward()
    sums = [
        sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None)
        for module in (ours, theirs)
    ]
    of_losses = ((found["token_loss"] - expected) / expected).abs().max()
    return max(of_losses.item(), abs((sums[0] / sums[1]).item() - 1))


def transformers_losses(theirs: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of each token [B, L], of the labels that our model has for it."""
    if "token_types" in inputs:
        given = {"token_type_ids": inputs["token_types"], "attention_mask": 1 - inputs["padding"]}
        logits = theirs(input_ids=inputs["tokens"], **given).prediction_logits
    else:
        logits = theirs(input_ids=inputs["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none").view(
        inputs["labels"].shape
    )


def main() -> int:
    """Print a line for each family; 1 if one differs."""
    found = {family: difference(family) for family in TINY}
    for family, error in found.items():
        print(f"{family}: {error:.1e}{'' if error <= LIMIT else ' DIFFERS'}")
    return int(any(not error <= LIMIT for error in found.values()))


if __name__ == "__main__":
    sys.exit(main())
