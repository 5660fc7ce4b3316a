"""Closed forms of a decoder's pipeline stage: its sites (calls of the strategy) and counts of parameters."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from spbench.impls.attended import Attended
from spbench.impls.composition import Stage
from spbench.impls.dispatchers.dispatcher import ExpertCall
from spbench.impls.kernels.packed_weights import HOLDER
from spbench.impls.layout import SiteKind
from spbench.impls.models.blocks.adapter_options import (
    CLOSING,
    EXPERTS,
    MLP_CLOSING,
    QKV,
    WHOLE,
)
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.models.blocks.latent_mixer import LatentAttention
from spbench.impls.strategies.base import Site

#: what a site asks in addition to its dims: its experts, attended and packed
_Asked = tuple[ExpertCall | None, Attended | None, Attended | None]

#: the kinds of sites of losses that send other messages than Megatron-LM's own loss, by ``cross_entropy``
_CROSS_ENTROPY_SITES: Mapping[str, SiteKind] = {
    "in_place": "cross_entropy_in_place",
    "compiled": "cross_entropy_in_place",
    "native": "cross_entropy_native",
}


def stage_sites(model: Architecture, batch: int, seq_len: int, rows: int, stage: Stage) -> list[Site]:
    """The sites of a pipeline stage for one batch, with a word embedding of ``rows`` rows."""
    layers = stage.layers(model.layers)
    alike: Counter[tuple[SiteKind, tuple[tuple[str, int], ...], bool, _Asked]] = Counter()
    predictions = [([layer], model.recomputes_layers) for layer in model.prediction_layers(stage)]
    for run, again in [*model.recomputed_runs(layers), *predictions]:
        for layer in run:
            # the last matmul runs again where dropout behind it keeps a mask, where tiles make the MLP one
            # function, and in a module of multi-token prediction, which has a norm behind its layer
            stops = layer == run[-1] and model.recompute_early_stop and layer in layers
            spared = stops and not (model.dropout or model.mlp_tiling.dims or model.adapts([MLP_CLOSING]))
            asked = _layer_sites(model, layer, batch, seq_len, again, spared)
            if model.lora_rank:
                asked = chain(frozen(asked), adapter_sites(model, layer, batch, seq_len, again))
            for site in asked:
                asks = site.experts, site.attended, site.packed
                alike[site.kind, tuple(site.dims.items()), site.recomputed, asks] += site.count
    sites = [Site(kind, n, dict(d), again, *asks) for (kind, d, again, asks), n in alike.items() if n]
    sites += model.vocabulary_sites(batch, seq_len, rows, stage, tied=model.shares_embedding)
    if predictions:
        of_head = {"vocabulary_logits": len(predictions), "cross_entropy": len(predictions)}
        sites = [replace(s, count=s.count + of_head.get(s.kind, 0)) for s in sites]
        hidden = {"B": batch, "L": seq_len, "H": model.hidden, "V": rows}
        sites.append(Site("embedding", len(predictions), hidden))
    loss = _CROSS_ENTROPY_SITES.get(model.cross_entropy, "cross_entropy")
    sites = [replace(s, kind=loss) if s.kind == "cross_entropy" else s for s in sites]
    in_tiles, tiles = ("vocabulary_logits", loss), model.loss_tiling.dims
    sites = [replace(s, dims={**s.dims, **tiles}) if s.kind in in_tiles else s for s in sites]
    sites += _parameter_sites(model, rows, stage)
    sites += model.scale_sites(len(layers), len(predictions))
    if not model.lora_rank:
        return sites
    trained = trained_parameters(model, rows, stage)
    return [*frozen(sites, trained, spared_by_packing(model, layers), model.lora_whole)]


def _parameter_sites(model: Architecture, rows: int, stage: Stage) -> Iterator[Site]:
    """The site of the parameters of a stage, and, unless adapters freeze all weights, the site of those that
    no step trains."""
    counts = stage_parameters(model, rows, stage)
    layers = [*stage.layers(model.layers), *model.prediction_layers(stage)]
    untrained = 0 if model.lora_rank else sum(model.mixing(i).untrained(model) for i in layers)
    yield Site("parameters", 1, counts | {"elements": counts["elements"] - untrained})
    if untrained:
        yield Site("frozen_parameters", 1, {"elements": untrained})


def _layer_sites(
    model: Architecture, layer: int, batch: int, seq_len: int, again: bool, spared: bool
) -> Iterator[Site]:
    """The sites of one layer for one batch; for ``again`` and ``spared`` see :meth:`FeedForward.sites`."""
    mixer, feeding = model.mixing(layer), model.feeding(layer)
    between = {"B": batch, "L": seq_len, "H": model.hidden, "F": mixer.width(model)}
    once = {"gathered_once": 1} if mixer.gathers_once(model) else {}
    kept = {"kept": 1} if model.keeps_operators else {}
    if not isinstance(mixer, LatentAttention):  # whose own sites include its opening projections
        yield Site("linear_in", 1, between | once | model.gathered_dims, again)
    yield Site("linear_out", 1, between | kept, again and not (spared and feeding is None))
    if feeding is not None:
        yield from feeding.sites(model, batch, seq_len, again, spared)
    yield from mixer.sites(model, batch, seq_len, again)


def stage_parameters(model: Architecture, rows: int, stage: Stage) -> dict[str, int]:
    """Counts of a stage's parameters, with a word embedding of ``rows`` rows. ``elements``: all parameters;
    ``split``: those that ranks can split over features or vocabulary; of these ``vocabulary``, ``mlp``, and
    ``key_value``, which ``kv_heads`` grouped heads share; ``experts``: those of routed experts, which
    ``split`` does not include."""
    h, predictions = model.hidden, model.prediction_layers(stage)
    layers = [*stage.layers(model.layers), *predictions]
    blocks: Counter[str] = Counter()
    feeding = [each for i in layers if (each := model.feeding(i)) is not None]
    for mixer in map(model.mixing, layers):
        blocks.update(mixer.parameters(model))
    for block in feeding:
        blocks.update(block.parameters(model))
    experts = blocks["experts"]
    of_norm = h * (2 if model.norm == "layer" else 1) if model.weighted_norms else 0
    of_block = 2 if model.norms == "around" else 1
    normed = len(layers) + (0 if model.norms == "shared" else len(feeding))
    whole = of_norm * (of_block * normed + stage.last) + blocks["whole"]
    whole += (3 * of_norm + 2 * h * h) * len(predictions)
    if model.biases:
        whole += h * len(layers)  # biases of the projections that close mixers
    if stage.first:
        whole += (model.learned_positions or 0) * h
    tables = stage.first or stage.last if model.tied else stage.first + stage.last
    if predictions and not model.tied:
        tables += not stage.first  # the last stage's copy of the embedding
    vocabulary = tables * rows * h
    split = blocks["split"] + vocabulary
    counts = {"elements": split + whole + experts, "split": split, "vocabulary": vocabulary}
    counts["mlp"] = blocks["mlp"]
    if experts:
        counts["experts"] = experts
    if model.kv_heads is not None and blocks["key_value"]:
        counts |= {"key_value": blocks["key_value"], "kv_heads": model.kv_heads}
    return counts


# -- adapters next to frozen weights -------------------------------------------------------------------------


def frozen(
    sites: Iterable[Site],
    trained: Mapping[str, int] | None = None,
    spared: Mapping[str, int] = {},
    whole: Sequence[str] = (),
) -> Iterator[Site]:
    """The sites with frozen weights: a frozen weight has no gradient, so no rank sums a gradient or keeps the
    input of the projection.

    Args:
        trained: the counts of trained parameters, for the sites of a stage; None: the sites of one layer.
        spared: the elements that packing frozen weights saves, by the names of the counts of parameters.
        whole: words of :data:`WHOLE` whose tensors are trained, next to a frozen tensor each.
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


def adapter_sites(model: Architecture, layer: int, batch: int, seq_len: int, again: bool) -> Iterator[Site]:
    """The sites of a layer's adapters for one batch; ``again``: whether backward recomputes the layer."""
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


def trained_parameters(model: Architecture, rows: int, stage: Stage) -> dict[str, int]:
    """Counts of a stage's trained parameters (adapters and ``lora_whole``), with the names that
    :func:`stage_parameters` has."""
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


def spared_by_packing(model: Architecture, layers: Sequence[int]) -> dict[str, int]:
    """The elements of the model's dtype that packing the frozen weights of these layers saves, by the names
    that :func:`stage_parameters` has."""
    if not model.packs:
        return {}
    counts: Counter[str] = Counter()
    for layer in layers:
        kind, hidden = model.mixing(layer), model.hidden
        keys = 2 * (model.kv_heads or model.heads) * model.head_size * hidden
        mlp = (model.mlp_projections + 1) * hidden * model.mlp_width(layer)
        matrices = (2 + getattr(kind, "gated", False)) * kind.width(model) * hidden + keys + mlp
        counts.update(elements=matrices, split=matrices, mlp=mlp, key_value=keys * model.grouped)
    return {name: n * (HOLDER - model.frozen_bits) // HOLDER for name, n in counts.items()}


def _blocks(model: Architecture, layer: int) -> Iterator[tuple[Sequence[str], str, int, bool]]:
    """The blocks of a layer, attention and then the MLP: the names of a block's opening projections and of
    its closing projection that may have adapters, the features between, and whether the block is the MLP."""
    kind = model.mixing(layer)
    opening = QKV if {*QKV} <= {*kind.adapted} else ()
    yield opening, CLOSING if CLOSING in kind.adapted else "", kind.width(model), False
    if width := model.mlp_width(layer):
        yield model.opening_names, MLP_CLOSING, width, True


def _adapters(model: Architecture, names: Sequence[str]) -> int:
    """The number of adapters of a block's opening projections."""
    places = model.adapted_apart(names)
    return int(model.adapts(names)) if places is None else len(places)


def _elements(
    model: Architecture, names: Sequence[str], closing: str, features: int, in_mlp: bool
) -> dict[str, int]:
    """Elements of a block's adapters: those that ranks can split, of the opening (``opens``) and the closing
    projections (``closes``), of ``opens`` those of keys and values (``key_value``), and those that every rank
    holds ``whole``."""
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
