"""The kernels of a transformers model, and what of its activations is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
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
    liger, family = str(step.liger.value).split(), str(fields.get("model_type", ""))
    if step.library.value != "torch":
        k.set("model_options.library", step.library.value, *step.library.names)
        k.approximate("projections of the same input are one matmul, not a layer each")
    elif family in SEPARATE:
        note = f"projections of {family} are layers of their own in transformers"
        k.set("model_options.separate_projections", True, note=note)
        if "norm" not in liger and not step.compiled.value:
            k.set("model_options.rms_norm", "plain", note="operator by operator in transformers")
    attention = attention_of(str(step.attention.value), fields)
    if attention is None:
        because = "FlashAttention-2 stands for it"
        k.stand_in(f"attention by {step.attention.value}", "time and memory", because, *step.attention.names)
    k.set("model_options.attention", attention or "flash_attention_2", *step.attention.names)
    if "norm" in liger:
        k.took("model_options.rms_norm: fused", *step.liger.names)
    gated = family not in WITHOUT_SWIGLU and fields.get("hidden_act", "silu") == "silu"
    if "swiglu" in liger and not step.mlp_tiles.value and gated:
        k.set("model_options.swiglu", "in_place", *step.liger.names)
    _loss(k, step, fields)
    k.ignore("kernels are transformers' own", *step.liger.names)
    if step.mlp_tiles.value:
        wide = fields.get("hidden_size") if step.mlp_tiles.value is True else step.mlp_tiles.value
        if wide:
            k.set(
                "model_options.mlp_tile",
                wide,
                *step.mlp_tiles.names,
                note="tokens, as many as the model is wide",
            )
    k.ignore("the MLP is computed at once", *step.mlp_tiles.names)
    _checkpoints(k, step)
    if step.fp8.value and step.library.value == "torch" and any(map(fields.get, EXPERTS)):
        k.refuse("eight bits of attention beside experts in sixteen", *step.fp8.names)
    elif step.fp8.value:
        k.set("model_options.fp8", step.fp8.value, *step.fp8.names, note=step.fp8.note)
    k.ignore("no layer is converted to matmuls in eight bits", *step.fp8.names)
    words = str(step.fused.value).split()
    routed = any(map(fields.get, EXPERTS))
    if "permutation" in words and routed:
        k.set("model_options.permutation", "fused", *step.fused.names)
    # the clamped SwiGLU of gpt-oss's experts too
    own = [name for name in FUSED_BY_COMPILER if name in words and (name != "swiglu" or gated or routed)]
    if own and step.library.value == "torch" and not step.compiled.value:
        k.set("model_options.fusions", own, *step.fused.names)
    k.took("kernels of their own", *step.fused.names)
    if step.compiled.value:
        fused = [name for name in FUSED_BY_COMPILER if name not in liger or step.mlp_tiles.value]
        k.add("model_options.fusions", fused, " ".join(step.compiled.names) or "torch.compile")
        k.approximate(COMPILED, *step.compiled.names)
    k.ignore("nothing is compiled", *step.compiled.names)


def _loss(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set the kernel of the loss, and its tiles."""
    if "loss" in str(step.liger.value).split():
        k.set("model_options.loss_tile", "liger", *step.liger.names, note=step.liger.note)
        k.set("model_options.cross_entropy", "in_place", *step.liger.names)
    elif step.loss_tile.value:
        tokens, rows = step.loss_tile.value
        whole = {**fields, **fields.get("text_config", {})}.get("vocab_size") or rows
        k.set("model_options.loss_tile", max(1, tokens * rows // max(whole, rows)), note=step.loss_tile.note)
        k.set(
            "model_options.cross_entropy", "in_place", note="a tile's gradient takes the place of its logits"
        )
        k.approximate("a tile's logits are not computed again in backward, and its sums are not in float32")
    else:
        for option, each in (("cross_entropy", step.cross_entropy), ("logits_held", step.logits_held)):
            if each.value not in ("plain", "none"):
                k.set(f"model_options.{option}", each.value, *each.names, note=each.note)
    k.took("the loss", *step.cross_entropy.names)


def _checkpoints(k: Account, step: TransformersStep) -> None:
    if step.recompute.value:
        k.set("model_options.recompute", "full", *step.recompute.names, note=step.recompute.note)
        how = "recompute_reentrant" if step.reentrant.value else "recompute_early_stop"
        note = "reentrant" if step.reentrant.value else "without reentrance"
        k.set(f"model_options.{how}", True, *step.reentrant.names, note=note)
        if step.kept.value != "device":
            k.set("model_options.checkpoints", step.kept.value, *step.kept.names, note=step.kept.note)
    elif step.kept.value != "device":
        because = "activations of layers stay on the device"
        k.stand_in(
            "activations on the host without checkpoints", "time and memory", because, *step.kept.names
        )
    k.ignore("nothing runs again", *step.recompute.names, *step.reentrant.names)
    k.ignore("checkpoints stay on the device", *step.kept.names)
