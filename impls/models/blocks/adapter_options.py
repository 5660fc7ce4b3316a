"""The options of a decoder of which low-rank adapters alone are trained, and what these ask of a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spbench.impls.strategies.base import Site

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel

#: projections that can have an adapter, by Hugging Face's names: of attention and of an MLP
QKV, CLOSING = ("q_proj", "k_proj", "v_proj"), "o_proj"
OPENING, MLP_CLOSING = ("gate_proj", "up_proj"), "down_proj"
PROJECTIONS = (*QKV, CLOSING, *OPENING, MLP_CLOSING)


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters of low rank (LoRA, arXiv 2106.09685), which alone are trained.

    Attributes:
        lora_rank: r; 0: no adapters, all weights are trained.
        lora_alpha: what an adapter adds is multiplied by ``lora_alpha / lora_rank``.
        lora_targets: the projections with an adapter, words of :data:`PROJECTIONS`. With separate_projections
            each has its own; else those of one matmul share one, as in Megatron-Bridge.
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: Sequence[str] = PROJECTIONS

    def check_adapters(self: Any) -> None:
        """Raise ValueError for options of adapters that do not fit each other, or the model."""
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))  # a list has no hash
        for name in self.lora_targets:
            if name not in PROJECTIONS:
                raise ValueError(f"lora_targets has words of {', '.join(PROJECTIONS)}, not {name!r}")
        if self.lora_rank < 0 or self.lora_alpha <= 0:
            raise ValueError("lora_rank is at least 0, and lora_alpha is above 0")
        if not self.lora_rank:
            return
        if not self.lora_targets:
            raise ValueError("lora_targets names no projection; name some, or leave lora_rank out")
        lacking = [name for name in self.lora_targets if name in (*QKV, CLOSING) and name not in self.adapted]
        if lacking:
            raise ValueError(
                f"lora_targets: {' and '.join(lacking)} of latent or linear attention have no adapters; name "
                f"some of {', '.join([*self.adapted, *OPENING, MLP_CLOSING])}"
            )
        for names in (QKV, self.opening_names) if not self.separate_projections else ():
            if 0 < len([name for name in names if name in self.lora_targets]) < len(names):
                raise ValueError(
                    f"{' and '.join(names)} are one matmul with one adapter; name all or none of them, or "
                    "set separate_projections"
                )
        if self.experts and self.adapts_mlp:
            raise ValueError("experts have no adapters; leave projections of MLPs out of lora_targets")
        if self.mtp_layers or self.keeps_operators:
            raise ValueError("lora_rank goes with neither mtp_layers nor recompute: operators")

    @property
    def lora_scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.lora_alpha / self.lora_rank

    @property
    def adapted(self: Any) -> list[str]:
        """The projections of attention that may have an adapter, in the layers that have them."""
        taken = {name for layer in range(self.layers) for name in self.mixing(layer).adapted}
        return [name for name in PROJECTIONS if name in taken]

    @property
    def opening_names(self: Any) -> tuple[str, ...]:
        """The projections that open an MLP."""
        return OPENING if self.gated_mlp else OPENING[1:]

    @property
    def adapts_mlp(self: Any) -> bool:
        """Whether a projection of MLPs has an adapter."""
        return self.adapts((*self.opening_names, MLP_CLOSING))

    def adapts(self, names: Sequence[str]) -> bool:
        """Whether one of these projections has an adapter."""
        return bool(self.lora_rank) and any(name in self.lora_targets for name in names)

    def adapted_apart(self: Any, names: Sequence[str]) -> list[int] | None:
        """The numbers of these projections that have an adapter of their own; None: they share one."""
        if not self.separate_projections:
            return None
        return [place for place, name in enumerate(names) if name in self.lora_targets]

    def adapter_variants(self: Any) -> list[Mapping[str, Any]]:
        """Changes of options of adapters to verify; see :meth:`Model.variants`."""
        if self.mtp_layers:
            return []
        targets = (*self.adapted, *(() if self.experts else (*OPENING, MLP_CLOSING)))
        if len(targets) < len(PROJECTIONS):
            return [{"lora_rank": 4, "recompute": "full", "lora_targets": targets}] if targets else []
        apart = {"separate_projections": True, "lora_targets": ("q_proj", "v_proj", "up_proj", "down_proj")}
        return [
            {"lora_rank": 4, "recompute": "full", "recompute_early_stop": True, "tied": True},
            {"lora_rank": 3, **({} if self.biases else apart), "mlp_tile": 7, "loss_tile": 7},
        ]


def frozen(sites: Iterable[Site], trained: Mapping[str, int] | None = None) -> Iterator[Site]:
    """What sites are where their weights are frozen: no gradient of a weight is summed, or needs the input of
    its projection.

    Args:
        trained: of sites of a whole model, the counts of its adapters' parameters; None: of layers alone.
    """
    around = ("embedding", "vocabulary_logits")
    weighted = ("linear_in", "linear_out", "grouped_query_linear_in") if trained is None else around
    for site in sites:
        if site.kind in weighted:
            yield replace(site, dims={**site.dims, "frozen": 1})
        elif site.kind == "parameters" and trained is not None:
            yield replace(site, kind="frozen_parameters")
            yield Site("parameters", 1, trained)
        elif site.kind not in ("shared_by_heads", "tied_embedding"):
            yield site


def adapter_sites(model: DecoderModel, layer: int, batch: int, seq_len: int, again: bool) -> Iterator[Site]:
    """What the adapters of a layer ask of a strategy for one batch; ``again``: the layer is recomputed."""
    rank = {"B": batch, "L": seq_len, "H": model.lora_rank}
    for names, closing, features, in_mlp in _blocks(model, layer):
        again = again or (in_mlp and model.recomputes("mlp"))
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


def adapter_parameters(model: DecoderModel, layers: Sequence[int]) -> dict[str, int]:
    """Counts of the parameters of some layers' adapters, as :meth:`DecoderModel.parameters` has them."""
    counts: Counter[str] = Counter()
    for layer in layers:
        for names, closing, features, in_mlp in _blocks(model, layer):
            of_block = _elements(model, names, closing, features, in_mlp)
            split = of_block["opens"] + of_block["closes"]
            counts["split"] += split
            counts["mlp"] += split * in_mlp
            counts["key_value"] += of_block["key_value"]
            counts["whole"] += of_block["whole"]
    dims = {"elements": counts["split"] + counts["whole"], "split": counts["split"], "vocabulary": 0}
    dims["mlp"] = counts["mlp"]
    if model.kv_heads is not None and counts["key_value"]:
        dims |= {"key_value": counts["key_value"], "kv_heads": model.kv_heads}
    return dims


def _blocks(model: DecoderModel, layer: int) -> Iterator[tuple[Sequence[str], str, int, bool]]:
    """A layer's attention, then its MLP: the names of the projections that open it and of the one that closes
    it, where these may have adapters, the features between them, and whether it is the MLP."""
    kind = model.mixing(layer)
    opening = QKV if QKV[0] in kind.adapted else ()
    yield opening, CLOSING if CLOSING in kind.adapted else "", kind.width(model), False
    if model.feeding(layer) is not None and not model.has_experts(layer):
        yield model.opening_names, MLP_CLOSING, model.inner, True


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
