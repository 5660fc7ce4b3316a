"""The options of a decoder whose low-rank adapters are trained while its own weights stay frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spbench.impls.kernels.packed_weights import HOLDER

#: Hugging Face's names of the projections of attention, then of an MLP, that can have an adapter
QKV, CLOSING = ("q_proj", "k_proj", "v_proj"), "o_proj"
OPENING, MLP_CLOSING = ("gate_proj", "up_proj"), "down_proj"
PROJECTIONS = (*QKV, CLOSING, *OPENING, MLP_CLOSING)
#: the projections from and to the latents of latent attention (queries without a latent have q_proj)
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
#: the word for adapters of routed experts: each expert has one for its opening and one for its closing matmul
EXPERTS = "experts"
#: peft's word for every linear layer; transformers' routed experts are tensors of many, and no linear layers
ALL = "all-linear"
#: the sites of the tensors that may be trained whole, by the words of the option ``lora_whole``
WHOLE = {"embedding": "embedding", "head": "vocabulary_logits"}
_WORDS, _OF_ATTENTION = (*PROJECTIONS, *LATENT, EXPERTS), (*QKV, CLOSING, *LATENT)


class LatentProjection(NamedTuple):
    """The features that go in and out of a projection from or to a latent; ``split``: whether ranks may each
    have a part of the outputs."""

    inputs: int
    outputs: int
    split: bool


@dataclass(frozen=True)
class AdapterOptions:
    """The options of adapters of low rank (LoRA, arXiv 2106.09685).

    Attributes:
        lora_rank: r; 0: no adapters, all weights are trained.
        lora_alpha: an adapter's output is multiplied by ``lora_alpha / lora_rank``.
        lora_dropout: the dropout of each adapter's input, in training.
        lora_targets: the projections with an adapter: words of :data:`PROJECTIONS` (an MLP's words are also
            for shared experts) and of :data:`LATENT`; "all-linear": all of these that the model has;
            "experts": the projections of each routed expert, see :class:`ExpertAdapters`. With
            separate_projections each projection has an adapter of its own; else the projections of one
            matmul share an adapter, as in Megatron-Bridge.
        lora_whole: the tensors that are trained whole, "embedding" and "head". The rank also holds the
            frozen tensor that each was copied from, as peft's modules_to_save does.
        frozen_bits: bits of a frozen projection's weights: 4 (QLoRA) or 8, unpacked at each use
            (:mod:`spbench.impls.kernels.packed_weights`); 16: the model's dtype, which routed experts, the
            embedding and the head always have.
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: Sequence[str] = (ALL,)
    lora_whole: Sequence[str] = ()
    frozen_bits: int = HOLDER

    def check_adapters(self: Any) -> None:
        """Raise ValueError for options of adapters that contradict each other or the model."""
        for name in ("lora_targets", "lora_whole"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list has no hash
        for name in self.lora_targets:
            if name not in (*_WORDS, ALL):
                raise ValueError(f"lora_targets has words of {', '.join((*_WORDS, ALL))}, not {name!r}")
        if self.frozen_bits not in (4, 8, HOLDER) or (self.packs and not self.lora_rank):
            raise ValueError("frozen_bits is 4, 8 or 16, and below 16 needs lora_rank")
        if not {*self.lora_whole} <= {*WHOLE} or (self.lora_whole and (self.tied or not self.lora_rank)):
            raise ValueError(
                f"lora_whole has words of {', '.join(WHOLE)}, and needs lora_rank and a head of its own "
                "(tied: false)"
            )
        if self.lora_rank < 0 or self.lora_alpha <= 0:
            raise ValueError("lora_rank is at least 0, and lora_alpha is above 0")
        if not 0 <= self.lora_dropout < 1 or (self.lora_dropout and not self.lora_rank):
            raise ValueError("lora_dropout is at least 0 and below 1, and above 0 needs lora_rank")
        if self.lora_dropout and (self.mlp_tiling or EXPERTS in self.lora_targets):
            raise ValueError("lora_dropout goes with neither mlp_tile nor lora_targets of experts")
        if not self.lora_rank:
            return
        if not self.lora_targets:
            raise ValueError("lora_targets names no projection; name some, or leave lora_rank out")
        if lacking := [name for name in self.lora_targets if name not in (*self.adapted, ALL)]:
            raise ValueError(
                f"lora_targets: this model has no {' and '.join(lacking)} for adapters; name some of "
                f"{', '.join(self.adapted)}"
            )
        of_one = [QKV] if {*QKV} <= {*self.adapted} else []
        for names in (*of_one, self.opening_names) if not self.separate_projections else ():
            if 0 < sum(self.adapts([name]) for name in names) < len(names):
                raise ValueError(
                    f"{' and '.join(names)} are one matmul with one adapter; name all or none of them, or "
                    "set separate_projections"
                )
        of_attention = [name for name in self.adapted if name in _OF_ATTENTION]
        if self.packs and (of_attention != [*QKV, CLOSING] or self.mlp_tiling):
            raise ValueError("frozen_bits packs softmax attention without latents, and MLPs without mlp_tile")
        if self.mtp_layers or self.keeps_operators or self.joint_qkv:
            raise ValueError(
                "lora_rank goes with neither mtp_layers, recompute: operators nor separate_projections: mlp"
            )

    @property
    def packs(self) -> bool:
        """Whether frozen weights are packed into fewer than 16 bits."""
        return self.frozen_bits < HOLDER

    @property
    def lora_scale(self) -> float:
        """The factor of an adapter's output."""
        return self.lora_alpha / self.lora_rank

    @property
    def adapted(self: Any) -> list[str]:
        """The words of the projections of this model that may have adapters in at least one layer."""
        layers = range(self.layers)
        taken = {name for kind in map(self.mixing, layers) for name in (*kind.adapted, *kind.latents(self))}
        if any(self.mlp_width(layer) for layer in layers):
            taken |= {*OPENING, MLP_CLOSING}
        if self.experts:  # whatever the layers: a trace of few layers may have only dense ones
            taken.add(EXPERTS)
        return [name for name in _WORDS if name in taken]

    @property
    def opening_names(self: Any) -> tuple[str, ...]:
        """The names of the projections that open an MLP, with the gate where the MLP has one."""
        return OPENING if self.gated_mlp else OPENING[1:]

    def adapts(self, names: Sequence[str]) -> bool:
        """Whether at least one of the projections with these names has an adapter."""
        words = {*self.lora_targets} | ({*PROJECTIONS, *LATENT} if ALL in self.lora_targets else set())
        return bool(self.lora_rank) and not words.isdisjoint(names)

    def adapted_apart(self: Any, names: Sequence[str]) -> list[int] | None:
        """The indices in ``names`` of projections with their own adapter; None: all share one adapter."""
        if not self.separate_projections:
            return None
        return [place for place, name in enumerate(names) if self.adapts([name])]

    def adapter_variants(self: Any) -> list[Mapping[str, Any]]:
        """The changes of the options of adapters that verification tries; see :meth:`Model.variants`."""
        if self.mtp_layers:
            return []
        targets = tuple(self.adapted)
        if targets != PROJECTIONS:
            experts = {"stacked_experts": True, "lora_targets": (ALL, EXPERTS)} if self.experts else {}
            return [{"lora_rank": 4, "recompute": "full", **experts}] if targets else []
        apart = {"separate_projections": True, "lora_targets": ("q_proj", "v_proj", "up_proj", "down_proj")}
        whole = {"lora_whole": ("head", "embedding"), "tied": False}
        return [
            {"lora_rank": 4, "recompute": "full", "recompute_early_stop": True, "tied": True},
            {"lora_rank": 3, **({} if self.biases else apart), "mlp_tile": 7, "loss_tile": 7, **whole},
        ]
