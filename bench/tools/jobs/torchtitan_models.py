"""The models of torchtitan, by name and flavor, as presets here and what differs from these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from spbench.bench.tools.jobs.account import Account
from spbench.impls.models.model import Model, model_preset

#: of qwen3, what its dense flavors do not share: layers, hidden, heads and inner
_QWEN3 = {"8B": (36, 4096, 32, 12288), "14B": (40, 5120, 40, 17408), "32B": (64, 5120, 64, 25600)}
#: flavors whose embedding and head are one weight, which two units of FSDP gather
TIED = ("debugmodel", "0.6B", "1.7B", "4B")
#: a bias that balances experts, in place of a loss (load_balance_coeff of its MoEArgs)
_BALANCED = {"aux_loss": "none", "aux_weight": 0.0, "router_bias": True, "experts_matmul": "grouped"}
#: rows are multiplied by their scores in float32 where their tokens are (models/moe/moe.py)
_BALANCED["expert_weighting_at"] = "tokens"


class Flavor(NamedTuple):
    """A model: its preset here, options that differ, and a note on the preset."""

    preset: str
    options: Mapping[str, Any] = {}
    note: str = ""


def _qwen3(layers: int, hidden: int, heads: int, inner: int) -> Flavor:
    options = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "inner": inner}
    options |= {} if hidden == 128 * heads else {"head_dim": 128}
    options |= {"vocabulary": 151936, "norm_epsilon": 1e-6, "rotary_base": 1e6, "qk_norm": True}  # type: ignore[dict-item]
    return Flavor("llama3-8b", options, "with the sizes of Qwen3")


FLAVORS: Mapping[str, Mapping[str, Flavor]] = {
    "llama3": {"8B": Flavor("llama3-8b"), "70B": Flavor("llama3-70b"), "405B": Flavor("llama3-405b")},
    "qwen3": {
        **{flavor: _qwen3(*sizes) for flavor, sizes in _QWEN3.items()},
        "30B-A3B": Flavor("qwen3-30b-a3b", _BALANCED),
        "235B-A22B": Flavor("qwen3-235b-a22b", _BALANCED),
    },
    "llama4": {
        "17bx16e": Flavor("llama4-scout", _BALANCED),
        # experts in each second layer
        "17bx128e": Flavor(
            "llama4-scout",
            {**_BALANCED, "experts": 128, "inner": 16384, "expert_inner": 8192, "expert_pattern": [0, 1]},
            "with the sizes of Maverick",
        ),
    },
    "deepseek_v3": {
        "16B": Flavor("deepseek-v2-lite", _BALANCED),
        "236B": Flavor("deepseek-v2", _BALANCED),
        "671B": Flavor("deepseek-v3", {**_BALANCED, "mtp_layers": 0}),
    },
    "gpt_oss": {"20b": Flavor("gpt-oss-20b", _BALANCED), "120b": Flavor("gpt-oss-120b", _BALANCED)},
}


class TorchtitanModel:
    """The model of a job, from its keys.

    Attributes:
        keys: the account of them.
        version: one letter of the versions of its table.
        preset: the model, with the options of its flavor.
        stages: ranks of a pipeline.
    """

    keys: Account
    version: str
    preset: Model
    stages: int

    @property
    def recent(self) -> bool:
        """Whether the version is 0.2.2 or newer."""
        return self.version in ("c", "d")

    def named(self, key: str) -> str:
        """The whole name of a key, whose section has changed."""
        return next(name for name in self.keys.program_arguments if name.rpartition(".")[2] == key)

    def value(self, name: str, otherwise: Any) -> Any:
        """The value of a key, or ``otherwise`` where this version has none of that name."""
        return self.keys.value(name) if name in self.keys.program_arguments else otherwise

    def set_model(self) -> None:
        """Set the model, its sizes and how torchtitan makes its layers."""
        k, names = self.keys, ("model.name", "model.flavor")
        name, flavor = map(k.value, names)
        flavors = FLAVORS.get(name, {})
        if not flavors or (name != "llama3" and not self.recent):
            k.refuse(f"another model than {', '.join(FLAVORS)} (0.2.2 and later) and llama3", "model.name")
        elif name == "qwen3" and flavor in TIED:
            k.refuse("one weight of embedding and head in two units of FSDP", "model.flavor")
        elif flavor not in flavors:
            k.refuse(f"another flavor of {name} than {', '.join(flavors)}", "model.flavor")
        flavors = flavors or FLAVORS["llama3"]
        model = flavors.get(flavor, next(iter(flavors.values())))
        self.preset = model_preset(model.preset, model.options)
        k.set("model", model.preset, *names, note=model.note)
        for option, value in model.options.items():
            k.set(f"model_options.{option}", value, "model.flavor")
        if not getattr(self.preset, "kv_lora_rank", 0):
            note = "wq, wk, wv and w1, w3 are layers of their own"
            k.set("model_options.separate_projections", True, note=note)
        self._attention()
        if self.recent:
            return
        own = ["model.norm_type"] if self.version == "a" else []
        norm = self.value("model.norm_type", "rmsnorm")
        if norm not in ("rmsnorm", "fused_rmsnorm"):
            k.refuse("layer norms without a bias", *own)
        one_kernel = norm == "fused_rmsnorm" or k.value("training.compile")
        way, note = "fused" if one_kernel else "plain", "" if own else "operator by operator"
        k.set("model_options.rms_norm", way, *own, note=note)

    @property
    def experts(self) -> int:
        """How many experts a layer of the model has; 0: none."""
        return int(getattr(self.preset, "experts", 0))

    def _attention(self) -> None:
        k, asked = self.keys, "model.attn_backend"
        flexible = self.experts and k.value("model.name") in ("gpt_oss", "deepseek_v3")
        if self.value(asked, "") not in ("", "sdpa") or flexible:
            k.leave("time", "attention is FlexAttention or of variable lengths, not FlashAttention", asked)
            k.approximate("attention is FlashAttention's, where theirs is another kernel")
        k.set(
            "model_options.attention",
            # FlashAttention takes no values whose heads are of another size than keys'
            "cudnn" if self.preset.of_one_head_size else "flash_attention_2",
            *([asked] if self.version == "d" else []),
            note="torch's scaled_dot_product_attention",
        )
        if self.value(predicted := "model.num_mtp_layers", 0):
            k.set("model_options.mtp_layers", k.value(predicted), predicted)

    def set_experts(self, tensor: int, tp_name: str) -> None:
        """Set over how many ranks experts are spread, and each of them split."""
        k, kinds = self.keys, ("expert_parallel_degree", "expert_tensor_parallel_degree")
        ranks_name, parts_name = (f"parallelism.{kind}" for kind in kinds)
        forced = "debug.moe_force_load_balance"
        if not self.experts:
            k.ignore("of layers with experts, which the model has not", ranks_name, parts_name, forced)
            return
        ranks, parts = k.count(ranks_name), self.value(parts_name, 1)
        if ranks > 1:
            k.set("sizes.ep", ranks, ranks_name)
        if parts not in (1, tensor):
            k.problems.append(f"{parts_name} {parts} is neither 1 nor {tp_name} {tensor}")
        elif ranks == 1 and self.version == "c" and tensor > 1:
            k.set("sizes.etp", tensor, tp_name, note="experts are split as all layers are")
            k.ignore("without expert parallelism experts are split as all layers are", parts_name)
        elif parts > 1:
            k.set("sizes.etp", parts, parts_name)
        if self.value(forced, False):
            k.set("model_options.routing", "round_robin", forced)
        k.ignore("one part: not split", ranks_name, parts_name)
        k.approximate("rows of an expert are not padded to a multiple of 8 or 16")
