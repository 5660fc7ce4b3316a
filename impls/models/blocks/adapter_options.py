"""The options of a decoder of which low-rank adapters alone are trained, and what these ask of a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from spbench.impls.composition import Stage
from spbench.impls.kernels.packed_weights import HOLDER
from spbench.impls.strategies.base import Site

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel
    from spbench.impls.models.blocks.decoder_options import DecoderOptions

#: projections that can have an adapter, by Hugging Face's names: of attention and of an MLP
QKV, CLOSING = ("q_proj", "k_proj", "v_proj"), "o_proj"
OPENING, MLP_CLOSING = ("gate_proj", "up_proj"), "down_proj"
PROJECTIONS = (*QKV, CLOSING, *OPENING, MLP_CLOSING)
#: of latent attention from and to its latents, each a matmul of its own (queries without a latent: q_proj)
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
#: each routed expert has an adapter of what opens it and one of what closes it
EXPERTS = "experts"
#: what peft calls every linear layer; in transformers and here routed experts are none, but tensors of many
ALL = "all-linear"
#: by the words of what may be trained whole, the sites that ask a strategy for it
WHOLE = {"embedding": "embedding", "head": "vocabulary_logits"}
_WORDS, _OF_ATTENTION = (*PROJECTIONS, *LATENT, EXPERTS), (*QKV, CLOSING, *LATENT)


class LatentProjection(NamedTuple):
    """A projection from or to a latent; ``split``: ranks may have parts of its outputs."""

    inputs: int
    outputs: int
    split: bool


class Adaptable:
    """What a layer's mixer says of the adapters that it may have."""

    #: its projections that may have one, all the others but those of latents
    adapted: ClassVar[Sequence[str]] = ()

    def latents(self, model: DecoderOptions) -> Mapping[str, LatentProjection]:
        """Its projections from and to latents, by their names."""
        return {}


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters of low rank (LoRA, arXiv 2106.09685), which alone are trained.

    Attributes:
        lora_rank: r; 0: no adapters, all weights are trained.
        lora_alpha: what an adapter adds is multiplied by ``lora_alpha / lora_rank``.
        lora_dropout: of what each adapter takes, in training.
        lora_targets: the projections with an adapter, words of :data:`PROJECTIONS`, also of shared experts,
            and of :data:`LATENT`; "all-linear": all of these that the model has; "experts": those of each
            routed expert, see :class:`ExpertAdapters`. With separate_projections each has its own; else those
            of one matmul share one, as in Megatron-Bridge.
        lora_whole: what is trained whole beside adapters, "embedding" and "head". The frozen tensor that it
            was copied from is held too, as by peft's modules_to_save.
        frozen_bits: of the weights of projections beside adapters: 4 (QLoRA) or 8, which each use unpacks
            (:mod:`spbench.impls.kernels.packed_weights`); 16: they have the model's dtype. Routed experts,
            the embedding and the head have that in any case: they are no linear layers, or are skipped.
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: Sequence[str] = (ALL,)
    lora_whole: Sequence[str] = ()
    frozen_bits: int = HOLDER

    def check_adapters(self: Any) -> None:
        """Raise ValueError for options of adapters that do not fit each other, or the model."""
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
        if self.mtp_layers or self.keeps_operators:
            raise ValueError("lora_rank goes with neither mtp_layers nor recompute: operators")

    @property
    def packs(self) -> bool:
        """Whether frozen weights are in few bits."""
        return self.frozen_bits < HOLDER

    @property
    def lora_scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.lora_alpha / self.lora_rank

    @property
    def adapted(self: Any) -> list[str]:
        """The words of what may have adapters in some layer."""
        layers = range(self.layers)
        taken = {name for kind in map(self.mixing, layers) for name in (*kind.adapted, *kind.latents(self))}
        if any(_mlp_width(self, layer) for layer in layers):
            taken |= {*OPENING, MLP_CLOSING}
        if self.experts:  # a trace of few layers may have dense ones alone
            taken.add(EXPERTS)
        return [name for name in _WORDS if name in taken]

    @property
    def opening_names(self: Any) -> tuple[str, ...]:
        """The projections that open an MLP."""
        return OPENING if self.gated_mlp else OPENING[1:]

    def adapts(self, names: Sequence[str]) -> bool:
        """Whether one of these projections of the model has an adapter."""
        words = {*self.lora_targets} | ({*PROJECTIONS, *LATENT} if ALL in self.lora_targets else set())
        return bool(self.lora_rank) and not words.isdisjoint(names)

    def adapted_apart(self: Any, names: Sequence[str]) -> list[int] | None:
        """The numbers of these projections that have an adapter of their own; None: they share one."""
        if not self.separate_projections:
            return None
        return [place for place, name in enumerate(names) if self.adapts([name])]

    def adapter_variants(self: Any) -> list[Mapping[str, Any]]:
        """Changes of options of adapters to verify; see :meth:`Model.variants`."""
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


def frozen(
    sites: Iterable[Site],
    trained: Mapping[str, int] | None = None,
    spared: Mapping[str, int] = {},
    whole: Sequence[str] = (),
) -> Iterator[Site]:
    """What sites are where their weights are frozen: no gradient of a weight is summed, or needs the input of
    its projection.

    Args:
        trained: of sites of a whole model, the counts of its adapters' parameters; None: of layers alone.
        spared: of the counts of its parameters, elements that packing saves.
        whole: words of :data:`WHOLE` that are trained, beside a frozen tensor each.
    """
    around = tuple(site for word, site in WHOLE.items() if word not in whole)
    weighted = ("linear_in", "linear_out", "grouped_query_linear_in") if trained is None else around
    for site in sites:
        if site.kind in weighted:
            yield replace(site, dims={**site.dims, "frozen": 1})
        elif site.kind == "parameters" and trained is not None:
            held = {name: n - spared.get(name, 0) for name, n in site.dims.items()}
            yield replace(site, kind="frozen_parameters", dims=held)
            yield Site("parameters", 1, trained)
        elif site.kind not in ("shared_by_heads", "tied_embedding"):
            yield site


def adapter_sites(model: DecoderModel, layer: int, batch: int, seq_len: int, again: bool) -> Iterator[Site]:
    """What the adapters of a layer ask of a strategy for one batch; ``again``: the layer is recomputed."""
    rank = {"B": batch, "L": seq_len, "H": model.lora_rank}
    for name, of_latent in model.mixing(layer).latents(model).items():
        if of_latent.split and model.adapts([name]):
            up_again = again or model.recomputes("mla_up_proj")
            yield Site("linear_in", 1, {**rank, "F": of_latent.outputs}, up_again)
    for names, closing, features, in_mlp in _blocks(model, layer):
        parts = ("moe", "shared_experts") if model.has_experts(layer) else ("mlp",)
        again = again or (in_mlp and any(map(model.recomputes, parts)))
        tiles = model.mlp_tiling.dims if in_mlp else {}
        many, once = _adapters(model, names), {"gathered_once": 1} if model.separate_projections else {}
        of_mlp = _elements(model, names, closing, features, in_mlp) if in_mlp else {}
        opens = {"mlp": of_mlp["opens"] // many} if many and in_mlp else {}
        if many:
            yield Site("linear_in", many, {**rank, "F": features, **once, **opens, **tiles}, again)
        if many and not in_mlp and model.grouped and not model.separate_projections:
            heads = {"Z": model.heads, "A": model.head_size, "G": model.kv_heads or model.heads}
            yield Site("grouped_query_linear_in", 1, {**heads, "H": model.lora_rank}, again)
        if model.adapts([closing]):
            closes = {"mlp": of_mlp["closes"]} if in_mlp else {}
            yield Site("linear_out", 1, {**rank, "F": features, **closes, **tiles}, again)


def trained_parameters(model: DecoderModel, rows: int, stage: Stage) -> dict[str, int]:
    """Counts of the parameters of a stage that are trained, adapters and what is trained whole, as
    :meth:`DecoderModel.parameters` has them."""
    layers = stage.layers(model.layers)
    counts: Counter[str] = Counter()
    for layer in layers:
        for name, (inputs, outputs, is_split) in model.mixing(layer).latents(model).items():
            if model.adapts([name]):
                counts["split" if is_split else "whole"] += model.lora_rank * outputs
                counts["whole"] += model.lora_rank * inputs
        if model.has_experts(layer) and model.adapts([EXPERTS]):
            opens = model.hidden + model.mlp_projections * model.expert_width
            closes = model.hidden + model.expert_width
            counts["experts"] += model.experts * model.lora_rank * (opens + closes)
        for names, closing, features, in_mlp in _blocks(model, layer):
            of_block = _elements(model, names, closing, features, in_mlp)
            split = of_block["opens"] + of_block["closes"]
            counts["split"] += split
            counts["mlp"] += split * in_mlp
            counts["key_value"] += of_block["key_value"]
            counts["whole"] += of_block["whole"]
    tables = (stage.first and "embedding" in model.lora_whole) + (stage.last and "head" in model.lora_whole)
    vocabulary = tables * rows * model.hidden
    split = counts["split"] + vocabulary
    elements = split + counts["whole"] + counts["experts"]
    dims = {"elements": elements, "split": split, "vocabulary": vocabulary, "mlp": counts["mlp"]}
    if counts["experts"]:
        dims["experts"] = counts["experts"]
    if model.kv_heads is not None and counts["key_value"]:
        dims |= {"key_value": counts["key_value"], "kv_heads": model.kv_heads}
    return dims


def spared_by_packing(model: DecoderModel, layers: Sequence[int]) -> dict[str, int]:
    """Elements that frozen weights of some layers are fewer for being packed, by the counts that
    :meth:`DecoderModel.parameters` has."""
    if not model.packs:
        return {}
    counts: Counter[str] = Counter()
    for layer in layers:
        kind, hidden = model.mixing(layer), model.hidden
        keys = 2 * (model.kv_heads or model.heads) * model.head_size * hidden
        mlp = (model.mlp_projections + 1) * hidden * _mlp_width(model, layer)
        matrices = (2 + getattr(kind, "gated", False)) * kind.width(model) * hidden + keys + mlp
        counts.update(elements=matrices, split=matrices, mlp=mlp, key_value=keys * model.grouped)
    return {name: n * (HOLDER - model.frozen_bits) // HOLDER for name, n in counts.items()}


def _blocks(model: DecoderModel, layer: int) -> Iterator[tuple[Sequence[str], str, int, bool]]:
    """A layer's attention, then its MLP: the names of the projections that open it and of the one that closes
    it, where these may have adapters, the features between them, and whether it is the MLP."""
    kind = model.mixing(layer)
    opening = QKV if {*QKV} <= {*kind.adapted} else ()
    yield opening, CLOSING if CLOSING in kind.adapted else "", kind.width(model), False
    if width := _mlp_width(model, layer):
        yield model.opening_names, MLP_CLOSING, width, True


def _mlp_width(model: DecoderModel, layer: int) -> int:
    """Features of a layer's MLP, or of its shared experts; 0: it has neither."""
    if model.feeding(layer) is None:
        return 0
    return model.shared_inner if model.has_experts(layer) else model.inner


def _adapters(model: DecoderModel, names: Sequence[str]) -> int:
    """How many adapters the projections that open a block have."""
    places = model.adapted_apart(names)
    return int(model.adapts(names)) if places is None else len(places)


def _elements(
    model: DecoderModel, names: Sequence[str], closing: str, features: int, in_mlp: bool
) -> dict[str, int]:
    """Elements of a block's adapters: those that can be split of what ``opens`` and what ``closes`` it, of
    these the ``key_value`` ones, and those that every rank holds ``whole``."""
    rank, hidden, closes = model.lora_rank, model.hidden, model.adapts([closing])
    of_keys = features if in_mlp else (model.kv_heads or model.heads) * model.head_size
    widths = zip(names, (features, of_keys, of_keys), strict=False)
    adapted = {name: width for name, width in widths if model.adapts([name])}
    keys = sum(adapted.get(name, 0) for name in QKV[1:])
    return {
        "opens": rank * sum(adapted.values()),
        "closes": rank * features * closes,
        "key_value": rank * keys if model.grouped else 0,
        "whole": rank * hidden * (_adapters(model, names) + closes),
    }
