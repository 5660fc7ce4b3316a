"""The kernels of a transformers model, and what of its activations is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.rules import Said
from spbench.bench.tools.jobs.transformers_step import EXPERTS, TransformersStep

#: by the name that transformers, or a program around it, has for it
ATTENTION = {
    "sdpa": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "flash_attn": "flash_attention_2",
    "flash_attention": "flash_attention_2",
    "fa2": "flash_attention_2",
    "flex_attention": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "fa3": "flash_attention_3",
    "eager": "unfused",
    "auto": "flash_attention_2",
    "flex": "flash_attention_2",
    "te": "cudnn",
    "cudnn": "cudnn",
}
#: torch's own, which gives values whose heads are of another size than keys' to a kernel that takes them:
#: cuDNN, or the memory-efficient one, which keeps as much (can_use_*_attention of aten's cuda/sdp_utils.cpp)
_OF_TORCH = ("sdpa", "auto", "flex_attention", "flex")
#: families of config.json whose models have a layer for each projection
SEPARATE = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"}
#: families whose MLPs have no gate, or another activation than SiLU on it
WITHOUT_SWIGLU = {
    *("gpt_oss", "nemotron_h", "gpt2", "gpt_neox", "bert", "phi", "falcon"),
    *("gemma", "gemma2", "gemma3", "gemma3_text"),
}
#: what torch.compile makes one kernel of that keeps fewer tensors: words of model_options.fusions
FUSED_BY_COMPILER = ("swiglu", "rope")
#: an option of models, its value (none is set where that is false), what asks for it, and a note
_Option = tuple[str, Any, Said, str]
_TILES = "tokens, as many as the model is wide"
COMPILED = "norms, SwiGLU and RoPE of what is compiled are a kernel each; Inductor fuses more"


def attention_of(name: str, fields: Mapping[str, Any]) -> str | None:
    """The kernel that a program's word for attention stands for; ``fields`` are those of the config.json.
    FlashAttention-2 would have its values padded."""
    if name in _OF_TORCH and fields.get("kv_lora_rank"):
        keys = sum(int(fields.get(f"qk_{part}_head_dim") or 0) for part in ("nope", "rope"))
        if keys != fields.get("v_head_dim"):
            return "cudnn"
    return ATTENTION.get(name)


def set_kernels(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set kernels, activation checkpointing, and tiles; ``fields`` are those of the config.json."""
    liger, fused = (str(each.value).split() for each in (step.liger, step.fused))
    family, routed = str(fields.get("model_type", "")), any(map(fields.get, EXPERTS))
    of_torch, compiled, tiles = step.library.value == "torch", step.compiled.value, step.mlp_tiles.value
    gated = family not in WITHOUT_SWIGLU and fields.get("hidden_act", "silu") == "silu"
    separate = of_torch and family in SEPARATE
    by_operator = separate and "norm" not in liger and not compiled
    of_layers = f"projections of {family} are layers of their own in transformers"
    if not of_torch:
        k.approximate("projections of the same input are one matmul, not a layer each")
    kernel = attention_of(str(step.attention.value), fields)
    if kernel is None:
        because = "FlashAttention-2 stands for it"
        k.stand_in(f"attention by {step.attention.value}", "time and memory", because, *step.attention.names)
    if partly := step.fp8.value and of_torch and routed:
        k.refuse("eight bits of attention beside experts in sixteen", *step.fp8.names)
    # the clamped SwiGLU of gpt-oss's experts too
    own = [name for name in FUSED_BY_COMPILER if name in fused and (name != "swiglu" or gated or routed)]
    if "norm" in liger:
        k.took("model_options.rms_norm: fused", *step.liger.names)
    options: Sequence[_Option] = (
        ("library", not of_torch and step.library.value, step.library, ""),
        ("separate_projections", separate, Said(True), of_layers),
        ("rms_norm", by_operator and "plain", Said(True), "operator by operator in transformers"),
        ("attention", kernel or "flash_attention_2", step.attention, ""),
        ("swiglu", "swiglu" in liger and not tiles and gated and "in_place", step.liger, ""),
        *_loss(k, step, fields),
        ("mlp_tile", fields.get("hidden_size") if tiles is True else tiles, step.mlp_tiles, _TILES),
        *_checkpoints(k, step),
        ("fp8", not partly and step.fp8.value, step.fp8, step.fp8.note),
        ("permutation", "permutation" in fused and routed and "fused", step.fused, ""),
        ("fusions", of_torch and not compiled and own, step.fused, ""),
    )
    for option, value, asked, note in options:
        if value:
            k.set(f"model_options.{option}", value, *asked.names, note=note)
    k.took("the loss", *step.cross_entropy.names)
    k.took("kernels of their own", *step.fused.names)
    if compiled:
        words = [name for name in FUSED_BY_COMPILER if name not in liger or tiles]
        k.add("model_options.fusions", words, " ".join(step.compiled.names) or "torch.compile")
        k.approximate(COMPILED, *step.compiled.names)
    k.ignore("kernels are transformers' own", *step.liger.names)
    k.ignore("the MLP is computed at once", *step.mlp_tiles.names)
    k.ignore("no layer is converted to matmuls in eight bits", *step.fp8.names)
    k.ignore("nothing is compiled", *step.compiled.names)
    k.ignore("nothing runs again", *step.recompute.names, *step.reentrant.names)
    k.ignore("checkpoints stay on the device", *step.kept.names)


def _loss(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> Sequence[_Option]:
    """The kernel of the loss, and its tiles."""
    if "loss" in str(step.liger.value).split():
        tile: _Option = "loss_tile", "liger", step.liger, step.liger.note
        return tile, ("cross_entropy", "in_place", step.liger, "")
    if not step.loss_tile.value:
        both = {"cross_entropy": step.cross_entropy, "logits_held": step.logits_held}
        return [(n, e.value not in ("plain", "none") and e.value, e, e.note) for n, e in both.items()]
    tokens, rows = step.loss_tile.value
    whole = {**fields, **fields.get("text_config", {})}.get("vocab_size") or rows
    k.approximate("a tile's logits are not computed again in backward, and its sums are not in float32")
    in_place = "a tile's gradient takes the place of its logits"
    tile = "loss_tile", max(1, tokens * rows // max(whole, rows)), Said(True), step.loss_tile.note
    return tile, ("cross_entropy", "in_place", Said(True), in_place)


def _checkpoints(k: Account, step: TransformersStep) -> Sequence[_Option]:
    """What runs again, by which of torch's functions, and where checkpoints wait."""
    kept, again, reentrant = step.kept, step.recompute, step.reentrant
    elsewhere = kept.value != "device"
    if not again.value:
        if elsewhere:
            because = "activations of layers stay on the device"
            missing = "activations on the host without checkpoints"
            k.stand_in(missing, "time and memory", because, *kept.names)
        return ()
    return (
        ("recompute", "full", again, again.note),
        ("recompute_reentrant", bool(reentrant.value), reentrant, "reentrant"),
        ("recompute_early_stop", not reentrant.value, reentrant, "without reentrance"),
        ("checkpoints", elsewhere and kept.value, kept, kept.note),
    )
