"""The parts of a model in the words of the program whose job it is."""

from __future__ import annotations

from collections.abc import Mapping

#: by the kind of job, what its program calls a module of the decoder here; "": what has no module of its own
_HUGGING_FACE = {
    "": "lm_head and the loss",
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "blocks.*.mixer_norm": "model.layers.*.input_layernorm",
    "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mixer": "model.layers.*.self_attn",
    "blocks.*.mlp.router": "model.layers.*.mlp.gate",
    "blocks.*.mlp.shared": "model.layers.*.mlp.shared_experts",
    "blocks.*.mlp": "model.layers.*.mlp",
    "blocks.*": "model.layers.*",
}
_MEGATRON = {
    "": "output_layer and the loss",
    "embedding": "embedding",
    "norm": "decoder.final_layernorm",
    "blocks.*.mixer_norm": "decoder.layers.*.input_layernorm",
    "blocks.*.mlp_norm": "decoder.layers.*.pre_mlp_layernorm",
    "blocks.*.mixer": "decoder.layers.*.self_attention",
    "blocks.*.mlp.router": "decoder.layers.*.mlp.router",
    "blocks.*.mlp.shared": "decoder.layers.*.mlp.shared_experts",
    "blocks.*.mlp": "decoder.layers.*.mlp",
    "blocks.*": "decoder.layers.*",
}
_TORCHTITAN = {
    "": "output and the loss",
    "embedding": "tok_embeddings",
    "norm": "norm",
    "blocks.*.mixer_norm": "layers.*.attention_norm",
    "blocks.*.mlp_norm": "layers.*.ffn_norm",
    "blocks.*.mixer": "layers.*.attention",
    "blocks.*.mlp.router": "layers.*.moe.router",
    "blocks.*.mlp.shared": "layers.*.moe.shared_experts",
    "blocks.*.mlp": "layers.*.feed_forward",
    "blocks.*": "layers.*",
}
_PLAIN = {"": "the head and the loss"}
_PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "": _PLAIN,
    "megatron": _MEGATRON,
    **dict.fromkeys(("bridge", "model_zoo", "primus"), _MEGATRON),
    "torchtitan": _TORCHTITAN,
}


def in_program_words(module: str, program: str) -> str:
    """What a program calls a module.

    Args:
        module: its path here, as ``blocks.*.mlp``; the name of a class: the decoder itself.
        program: the kind of its job; "" for none.
    """
    words = {**_PROGRAMS.get(program, _HUGGING_FACE), "loader_mask": "the data loader's attention mask"}
    if "Decoder" in module:
        return words[""]
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (path := ".".join(parts[:end])) in words:
            return words[path]
    return module


def part_of_experts(kind: str, module: str, experts: bool) -> str:
    """What a part of a peak is of a layer with experts; "" for other parts.

    Args:
        kind: of memory, as "activations".
        module: in which it was allocated.
        experts: whether the model's feed-forward layers have any.
    """
    if not experts or ".mlp" not in module or module.endswith(("mlp_norm", "mlp_end")):
        return ""
    if ".mlp.router" in module:
        return "router"
    if ".mlp.shared" in module:
        return "shared experts"
    return "dispatch buffers" if kind == "communication_buffers" else "routed experts, dispatch"
