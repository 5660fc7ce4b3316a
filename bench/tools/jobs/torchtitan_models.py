"""The models of torchtitan that there are here, from the keys of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account

#: by model.flavor of llama3
PRESETS = {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"}
#: by model.flavor of qwen3, what its flavors do not share: layers, hidden, heads and inner
QWEN3 = {"8B": (36, 4096, 32, 12288), "14B": (40, 5120, 40, 17408), "32B": (64, 5120, 64, 25600)}
#: those whose embedding and head are one weight, which two units of FSDP gather
_QWEN3_TIED = ("debugmodel", "0.6B", "1.7B", "4B")
#: models of torchtitan that no model here is, and why
_WITH_EXPERTS = {
    "llama4": "a mixture of experts (MoE)",
    "deepseek_v3": "a mixture of experts (MoE) and multi-head latent attention (MLA)",
    "gpt_oss": "a mixture of experts (MoE) and a softmax with sinks",
}


def qwen3_options(flavor: str) -> dict[str, Any]:
    """The options that make llama3-8b a Qwen3."""
    layers, hidden, heads, inner = QWEN3[flavor]
    options = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "inner": inner}
    options |= {} if hidden == 128 * heads else {"head_dim": 128}
    return options | {"vocabulary": 151936, "norm_epsilon": 1e-6, "rotary_base": 1e6, "qk_norm": True}


def set_model(k: Account, version: str) -> None:
    """Set the model, its sizes and how torchtitan makes its layers, in a version of torchtitan."""
    name, flavor = k.value("model.name"), k.value("model.flavor")
    flavors: Mapping[str, Any] = QWEN3 if name == "qwen3" else PRESETS
    if name not in ("llama3", "qwen3") or (name == "qwen3" and version != "c"):
        k.refuse(_WITH_EXPERTS.get(name, "another model than llama3 and, in 0.2.2, qwen3"), "model.name")
    elif name == "qwen3" and flavor in _QWEN3_TIED:
        k.refuse("one weight of embedding and head in two units of FSDP", "model.flavor")
    elif name == "qwen3" and flavor not in flavors and "-A" in flavor:
        k.refuse("a mixture of experts (MoE)", "model.flavor")
    elif flavor not in flavors:
        k.refuse(f"another flavor of {name} than {', '.join(flavors)}", "model.flavor")
    _set_sizes(k, name, flavor)
    k.set("model_options.separate_projections", True, note="wq, wk, wv and w1, w3 are layers of their own")
    k.set("model_options.attention", "flash_attention_2", note="torch's scaled_dot_product_attention")
    if version == "c":
        return
    norm = k.value("model.norm_type") if version == "a" else "rmsnorm"
    names = ["model.norm_type"] if version == "a" else []
    if norm not in ("rmsnorm", "fused_rmsnorm"):
        k.refuse("layer norms without a bias", *names)
    way = "fused" if norm == "fused_rmsnorm" else "plain"
    k.set("model_options.rms_norm", way, *names, note="" if names else "operator by operator")


def _set_sizes(k: Account, name: str, flavor: str) -> None:
    names = ("model.name", "model.flavor")
    if name != "qwen3":
        k.set("model", PRESETS.get(flavor, "llama3-8b"), *names)
        return
    k.set("model", "llama3-8b", *names, note="with the sizes of Qwen3")
    for option, value in qwen3_options(flavor if flavor in QWEN3 else "8B").items():
        k.set(f"model_options.{option}", value, "model.flavor")
