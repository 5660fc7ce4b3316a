"""Compare losses of tiny models from config.json with the losses of transformers' models of the same weights.

Needs transformers, which the project does not depend on: `pip install transformers` in an environment of this
project, then `python scripts/compare_with_transformers.py`. For each family the script builds both models in
float64, copies transformers' weights into ours, runs one batch, and prints the larger of two relative
differences, of a token's loss and of the squared gradient of all weights; the exit code is 1 if one is above
LIMIT. (transformers computes RoPE's angles in float32.)
"""

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.models.huggingface.config import model_from_config
from spbench.impls.options import set_options
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype

BATCH, LENGTH = 2, 12
LIMIT = 1e-6

_SIZES = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_SIZES, "intermediate_size": 80, "num_key_value_heads": 2}
#: without the loss that balances experts, because the losses of tokens do not include it
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_DEEPSEEK = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "pad_token_id": None}
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
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {
        **_EXPERTS,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {
        **_EXPERTS,
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": 5,
        "rope_scaling": None,
    },
    # the scores are scaled by the head size and have no cap, because a cap is not modelled
    "gemma2": {**_GEMMA, "sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    "gemma3_text": {**_GEMMA, "sliding_window": 5, "sliding_window_pattern": 2},
    "olmo2": _LLAMA,
    "glm4": {**_LLAMA, "head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": None},
    "qwen3_5_text": {
        **_LLAMA,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 20, "n_group": 4, "topk_group": 2},
    "gpt2": {
        "vocab_size": 96,
        "n_positions": 32,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "gpt_neox": {**_SIZES, "intermediate_size": 192, "rotary_pct": 0.5},
    "phi": {**_SIZES, "intermediate_size": 192, "partial_rotary_factor": 0.5},
    "falcon": {**_SIZES, "multi_query": True, "new_decoder_architecture": False},
    "bert": {
        **_SIZES,
        "intermediate_size": 192,
        "max_position_embeddings": 32,
        # the activation of our model
        "hidden_act": "gelu_new",
        "pad_token_id": None,  # transformers gives the embedding of a padding token no gradient
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    },
}


def grouped(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """The rows of queries, keys and values [heads x A, ...] as the weight [groups, rows of a group, ...] of
    :class:`GroupedQueryLinear`."""
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, 1)


#: transformers' names of a layer's norms, by our names, for families with different places of norms
_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_BEHIND = {"mixer_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_NORMS_OF_GEMMA = _NORMS_BEHIND | {"mixer_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_NORMS_OF_GLM = _NORMS | {
    "mixer_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def of_llama(
    theirs: Mapping[str, Tensor], config: Any, norms: Mapping[str, str] = _NORMS
) -> dict[str, Tensor]:
    """The weights of Llama, Mistral, Qwen2 and Qwen3 (``theirs``: by transformers' names) by our names."""
    kv_heads, ours = config.num_key_value_heads, {}
    ours["embedding.weight"] = theirs["model.embed_tokens.weight"]
    ours["norm.weight"] = theirs["model.norm.weight"]
    ours["head"] = theirs["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"model.layers.{i}."
        for mine, name in norms.items():
            ours[f"{own}{mine}.weight"] = theirs[f"{other}{name}.weight"]
        for kind in ("weight", "bias"):
            names = [f"{other}self_attn.{p}_proj.{kind}" for p in "qkv"]
            if names[0] in theirs:
                ours[own + f"mixer.project.{kind}"] = grouped(*(theirs[name] for name in names), kv_heads)
        if f"{other}self_attn.o_proj.weight" in theirs:
            ours[own + "mixer.out.weight"] = theirs[other + "self_attn.o_proj.weight"]
        for norm in ("q_norm", "k_norm"):
            ours[own + f"mixer.{norm}"] = theirs.get(other + f"self_attn.{norm}.weight", torch.empty(0))
        ours |= of_mlp(own + "mlp.", other + "mlp.", theirs)
    return ours


def of_mlp(own: str, other: str, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an MLP with a gate, or of experts with their shared experts, by our names; ``own`` and
    ``other``: the prefixes of our names and of transformers'."""
    ours = {}
    for place, name in (("", ""), ("shared.", "shared_expert."), ("shared.", "shared_experts.")):
        if f"{other}{name}gate_proj.weight" in theirs:
            mlp = [theirs[f"{other}{name}{part}_proj.weight"] for part in ("gate", "up")]
            ours[f"{own}{place}project.weight"] = torch.stack(mlp)
            ours[f"{own}{place}out.weight"] = theirs[f"{other}{name}down_proj.weight"]
    if f"{other}shared_expert_gate.weight" in theirs:
        ours[f"{own}shared_gate.weight"] = theirs[f"{other}shared_expert_gate.weight"]
    for router in ("gate", "router"):
        for kind in ("weight", "bias"):
            if f"{other}{router}.{kind}" in theirs:
                ours[f"{own}router.{kind}"] = theirs[f"{other}{router}.{kind}"]
    return ours | of_experts(own, other, theirs)


def of_experts(own: str, other: str, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of routed experts by our names, stacked. transformers has a tensor for each expert or, for
    gpt-oss, one tensor in which columns of gate and projection alternate."""
    ours: dict[str, Tensor] = {}
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        opens, closes = [], []
        for i in itertools.count():
            names = [f"{other}experts.{i}.{name}.weight" for name in (gate, up, down)]
            if names[0] not in theirs:
                break
            opens.append(torch.stack([theirs[name] for name in names[:2]]))
            closes.append(theirs[names[2]])
        if opens:
            ours |= {f"{own}experts.opens.weight": torch.stack(opens)}
            ours |= {f"{own}experts.closes.weight": torch.stack(closes)}
    if f"{other}experts.gate_up_proj" in theirs:
        opens, closes = (theirs[f"{other}experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        biases = [theirs[f"{other}experts.{name}_bias"] for name in ("gate_up_proj", "down_proj")]
        ours |= {
            f"{own}experts.opens.weight": opens.mT.unflatten(1, (-1, 2)).transpose(1, 2),
            f"{own}experts.opens.bias": biases[0].unflatten(1, (-1, 2)).mT,
            f"{own}experts.closes.weight": closes.mT,
            f"{own}experts.closes.bias": biases[1],
        }
    return ours


def plus_one(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, to which one is added in norms, because transformers' norms of the family add one."""
    return {n: x + 1 if n.endswith(("norm.weight", "layernorm.weight")) else x for n, x in theirs.items()}


def of_gemma(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of Gemma 2 and 3 by our names."""
    return of_llama(plus_one(theirs), config, _NORMS_OF_GEMMA)


def of_olmo(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of OLMo 2 by our names."""
    return of_llama(theirs, config, _NORMS_BEHIND)


def of_glm(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of GLM-4 by our names; in transformers the pairs that RoPE turns are neighbours."""
    size, plain = config.head_dim, dict(theirs)
    pairs = torch.arange(size // 2).view(-1, 2).mT.flatten()
    order = torch.cat((pairs, torch.arange(size // 2, size)))
    for name, x in theirs.items():
        if "q_proj" in name or "k_proj" in name:
            plain[name] = x.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        elif name.endswith("gate_up_proj.weight"):
            halves = zip(("gate_proj", "up_proj"), x.chunk(2), strict=True)
            plain |= {name.replace("gate_up_proj", part): half for part, half in halves}
    return of_llama(plain, config, _NORMS_OF_GLM)


def of_gated_delta(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of Qwen3.5's text by our names; transformers has queries and gates in one weight."""
    plain, ours = dict(theirs), {}
    for i, kind in enumerate(config.layer_types):
        own, other = f"blocks.{i}.mixer.", f"model.layers.{i}."
        if kind == "full_attention":
            name = f"{other}self_attn.q_proj.weight"
            both = theirs[name].unflatten(0, (config.num_attention_heads, 2, -1))
            plain[name], ours[f"{own}gate.weight"] = (x.flatten(0, 1) for x in both.unbind(1))
            continue
        other += "linear_attn."
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        parts = [*theirs[f"{other}in_proj_qkv.weight"].split([keys, keys, values])]
        parts += [theirs[f"{other}in_proj_{part}.weight"] for part in "zab"]
        ours |= {f"{own}project.weights.{place}": x for place, x in enumerate(parts)}
        kernels = theirs[f"{other}conv1d.weight"].squeeze(1).split([keys, keys, values])
        ours |= {f"{own}convolutions.{place}": x for place, x in enumerate(kernels)}
        names = {"A_log": "A_log", "dt_bias": "dt_bias", "out.weight": "out_proj.weight"}
        ours |= _layer(own, other, {**names, "norm": "norm.weight"}, theirs)
    return of_llama(plus_one(plain), config) | ours


def of_mixtral(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of Mixtral by our names."""
    return of_llama({name.replace("block_sparse_moe", "mlp"): x for name, x in theirs.items()}, config)


def of_gpt_oss(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of gpt-oss by our names."""
    ours = of_llama(theirs, config)
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"model.layers.{i}.self_attn."
        names = {"mixer.sinks": "sinks", "mixer_end.bias": "o_proj.bias"}
        ours |= _layer(own, other, names, theirs)
    return ours


def of_deepseek(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of DeepSeek-V2 and V3 by our names; the pairs that RoPE turns are neighbours in
    transformers, and half a head apart in our models."""
    plain, turned, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    pairs = torch.arange(turned).view(-1, 2).mT.flatten()
    ours = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "head": theirs["lm_head.weight"],
    }
    names = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mixer.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        "mixer.kv_up.weight": "self_attn.kv_b_proj.weight",
        "mixer.out.weight": "self_attn.o_proj.weight",
    }
    of_queries = {"mixer.q_norm.weight": "q_a_layernorm.weight", "mixer.q_down.weight": "q_a_proj.weight"}
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"model.layers.{i}."
        ours |= _layer(own, other, names, theirs)
        if config.q_lora_rank is not None:
            ours |= _layer(own, f"{other}self_attn.", of_queries, theirs)
        q = theirs[f"{other}self_attn.q_{'b_' if config.q_lora_rank else ''}proj.weight"]
        heads = q.unflatten(0, (config.num_attention_heads, -1))
        ours[own + "mixer.q_up.weight"] = torch.cat((heads[:, :plain], heads[:, plain:][:, pairs]), 1)
        down = theirs[f"{other}self_attn.kv_a_proj_with_mqa.weight"]
        ours[own + "mixer.kv_down.weight"] = torch.cat((down[:rank], down[rank:][pairs]))
        ours |= of_mlp(own + "mlp.", other + "mlp.", theirs)
    return ours


def _layer(own: str, other: str, names: Mapping[str, str], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {own + ours: theirs[other + name] for ours, name in names.items()}


def of_gpt2(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of GPT-2 by our names; transformers has the projections transposed."""
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
    """The weights of GPT-NeoX by our names; queries, keys and values are ordered by heads in both models."""
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


def of_phi(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of Phi-1.5 and Phi-2 by our names."""
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "head": theirs["lm_head.weight"]}
    ours |= _layer("norm.", "model.final_layernorm.", {"weight": "weight", "bias": "bias"}, theirs)
    names = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mixer_norm.bias": "input_layernorm.bias",
        "mixer.out.weight": "self_attn.dense.weight",
        "mixer_end.bias": "self_attn.dense.bias",
        "mlp.project.weight": "mlp.fc1.weight",
        "mlp.project.bias": "mlp.fc1.bias",
        "mlp.out.weight": "mlp.fc2.weight",
        "mlp_end.bias": "mlp.fc2.bias",
    }
    for i in range(config.num_hidden_layers):
        own, other = f"blocks.{i}.", f"model.layers.{i}."
        ours |= _layer(own, other, names, theirs)
        for kind in ("weight", "bias"):
            qkv = [theirs[f"{other}self_attn.{p}_proj.{kind}"] for p in "qkv"]
            ours[f"{own}mixer.project.{kind}"] = grouped(*qkv, config.num_attention_heads)
    return ours


def of_falcon(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of Falcon-7B by our names; in both models one key and one value follow the queries."""
    ours = {"embedding.weight": theirs["transformer.word_embeddings.weight"]}
    ours |= _layer("norm.", "transformer.ln_f.", {"weight": "weight", "bias": "bias"}, theirs)
    names = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mixer_norm.bias": "input_layernorm.bias",
        "mixer.project.weight": "self_attention.query_key_value.weight",
        "mixer.out.weight": "self_attention.dense.weight",
        "mlp.project.weight": "mlp.dense_h_to_4h.weight",
        "mlp.out.weight": "mlp.dense_4h_to_h.weight",
    }
    for i in range(config.num_hidden_layers):
        ours |= _layer(f"blocks.{i}.", f"transformer.h.{i}.", names, theirs)
    return ours


def of_bert(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of BERT by our names; our queries, keys and values are ordered by heads."""
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
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), of_llama),
    **dict.fromkeys(("gemma2", "gemma3_text"), of_gemma),
    "olmo2": of_olmo,
    "glm4": of_glm,
    "qwen3_5_text": of_gated_delta,
    "mixtral": of_mixtral,
    "gpt_oss": of_gpt_oss,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), of_deepseek),
    "gpt2": of_gpt2,
    "gpt_neox": of_gpt_neox,
    "phi": of_phi,
    "falcon": of_falcon,
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
    if family == "phi":
        model.lm_head.bias = None  # our model has no such bias
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3TopkRouter":  # its float32 is added to float64
            module.register_forward_hook(lambda _, __, routed: (routed[0], routed[1].double()))
    return model, config


def difference(family: str) -> float:
    """The larger relative difference of two: of a token's loss, and of all weights' squared gradients."""
    theirs, config = transformers_model(family)
    model = model_from_config({"model_type": family, **TINY[family]})
    if getattr(model, "experts", 0):
        model = set_options(model, {"stacked_experts": True}, family)
    with default_dtype(torch.float64):
        ours = model.build(Strategy(), LENGTH)
    weights = WEIGHTS[family](dict(theirs.state_dict()), config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name].reshape(parameter.shape))
    inputs = model.inputs(BATCH, LENGTH, torch.Generator().manual_seed(1))
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    outputs = ours(inputs)
    outputs["token_loss"].sum().backward()
    expected = transformers_losses(theirs, inputs)
    expected.sum().backward()
    sums = [
        sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None)
        for module in (ours, theirs)
    ]
    of_losses = ((outputs["token_loss"] - expected) / expected).abs().max()
    return max(of_losses.item(), abs((sums[0] / sums[1]).item() - 1))


def transformers_losses(theirs: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of each token [B, L] in transformers' model, for the labels of our model's ``inputs``."""
    if "token_types" in inputs:
        given = {"token_type_ids": inputs["token_types"], "attention_mask": 1 - inputs["padding"]}
        logits = theirs(input_ids=inputs["tokens"], **given).prediction_logits
    else:
        logits = theirs(input_ids=inputs["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none").view(
        inputs["labels"].shape
    )


def main() -> int:
    """Print a line for each family, or for the families on the command line; 1 if one differs."""
    differences = {family: difference(family) for family in sys.argv[1:] or TINY}
    for family, error in differences.items():
        print(f"{family}: {error:.1e}{'' if error <= LIMIT else ' DIFFERS'}")
    return int(any(not error <= LIMIT for error in differences.values()))


if __name__ == "__main__":
    sys.exit(main())
