"""The options of latent attention and of multi-token prediction, named as in DeepSeek's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: for verification: a head's query and key have 6 features, its value 5
TINY_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}


@dataclass(frozen=True)
class LatentOptions:
    """Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1), in the layers with softmax attention,
    and multi-token prediction (arXiv 2412.19437, section 2.2).

    Keys and values of all heads are projected from one latent vector a position, and so may queries be. A
    head's query and key have features without a position and others that RoPE turns; the latter of the keys
    are one vector a position for all heads.

    Attributes:
        kv_lora_rank: features of the latent that keys and values are projected from; 0: no latent attention.
        q_lora_rank: features of the queries' latent; None: they are projected from the hidden state.
        qk_nope_head_dim: features of a head's query and key without a position.
        qk_rope_head_dim: those that RoPE turns.
        v_head_dim: features of a head's value.
        padded_values: values get zeros up to the head size of keys, for kernels and messages with one head
            size (transformers with FlashAttention-2).
        mtp_layers: modules of multi-token prediction: module d predicts the token after the next d from the
            hidden state of module d - 1 and that token's predecessor.
        mtp_weight: of the mean of their losses.
    """

    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    padded_values: bool = False
    mtp_layers: int = 0
    mtp_weight: float = 0.3

    @property
    def latent(self) -> dict[str, Any]:
        """The options of a layer, as :class:`LatentAttention` names them."""
        return {
            "kv_rank": self.kv_lora_rank,
            "q_rank": self.q_lora_rank,
            "plain_size": self.qk_nope_head_dim,
            "turned_size": self.qk_rope_head_dim,
            "value_size": self.v_head_dim,
            "padded": self.padded_values,
        }

    @property
    def of_one_head_size(self) -> Mapping[str, Any]:
        """See :attr:`spbench.impls.models.model.Model.of_one_head_size`."""
        keys = self.qk_nope_head_dim + self.qk_rope_head_dim
        return {"padded_values": True} if self.kv_lora_rank and self.v_head_dim < keys else {}

    @property
    def small_latent(self) -> dict[str, Any]:
        """The sizes of :data:`TINY_LATENT`, with a latent of queries where there is one."""
        none = {"q_lora_rank": None} if self.q_lora_rank is None else {}
        return {**TINY_LATENT, **none, "mtp_layers": min(1, self.mtp_layers)}

    def latent_variants(self) -> list[Mapping[str, Any]]:
        """Changes of these options to verify."""
        if not self.kv_lora_rank:
            return []
        return [
            {"q_lora_rank": None, "padded_values": True, "mtp_layers": 0}
            | {"recompute": "selective", "recompute_modules": ("core_attn", "mla_up_proj")},
            {"mtp_layers": 2, "documents": (7, 1, 11, 5), "library": "transformer-engine"},
            {"recompute": "selective", "recompute_modules": ("mla_up_proj",)},
        ]

    def check_latent(self) -> None:
        """Raise ValueError where these options do not fit each other or the others."""
        if min(self.kv_lora_rank, self.mtp_layers) < 0:
            raise ValueError("kv_lora_rank and mtp_layers are at least 0")
        if not self.kv_lora_rank:
            if self.q_lora_rank is not None or self.padded_values:
                raise ValueError("q_lora_rank and padded_values need latent attention; set kv_lora_rank")
            return
        sizes: dict[str, Any] = {
            name: getattr(self, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        if self.q_lora_rank is not None:
            sizes["q_lora_rank"] = self.q_lora_rank
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is at least 1, not {size}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"RoPE turns pairs, but qk_rope_head_dim is {self.qk_rope_head_dim}")
        if self.padded_values and self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(f"padded_values: v_head_dim {self.v_head_dim} is above the head size of keys")
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                raise ValueError(f"latent attention has no {name}; leave it out")
        if getattr(self, "qk_norm", False) or getattr(self, "output_gate", False):
            raise ValueError("latent attention has neither qk_norm nor output_gate; leave them out")
        if getattr(self, "rotary_share", 1.0) != 1:
            raise ValueError("latent attention turns qk_rope_head_dim features; leave rotary_share out")
