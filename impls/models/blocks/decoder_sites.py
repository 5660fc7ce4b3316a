"""What a stage of a decoder asks of a strategy, and how many parameters it has, without building it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from spbench.impls.composition import Stage
from spbench.impls.dispatchers.dispatcher import ExpertCall
from spbench.impls.layout import SiteKind
from spbench.impls.models.blocks.adapter_options import (
    MLP_CLOSING,
    adapter_sites,
    frozen,
    spared_by_packing,
    trained_parameters,
)
from spbench.impls.models.blocks.latent_mixer import LatentAttention
from spbench.impls.strategies.base import Site

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel

#: of ways of the loss that send other messages than Megatron-LM's own
_CROSS_ENTROPY_SITES: Mapping[str, SiteKind] = {
    "in_place": "cross_entropy_in_place",
    "compiled": "cross_entropy_in_place",
    "native": "cross_entropy_native",
}


def stage_sites(model: DecoderModel, batch: int, seq_len: int, rows: int, stage: Stage) -> list[Site]:
    """What a stage asks of a strategy for one batch, with a vocabulary of that many rows."""
    layers = stage.layers(model.layers)
    alike: Counter[tuple[SiteKind, tuple[tuple[str, int], ...], bool, ExpertCall | None]] = Counter()
    predictions = [([layer], model.recomputes_layers) for layer in model.prediction_layers(stage)]
    for run, again in [*model.recomputed_runs(layers), *predictions]:
        for layer in run:
            # what drops the output's elements keeps a mask, which the last matmul runs again for; tiles
            # are one function, which runs whole; the layer of a prediction has a norm behind it
            stops = layer == run[-1] and model.recompute_early_stop and layer in layers
            spared = stops and not (model.dropout or model.mlp_tiling.dims or model.adapts([MLP_CLOSING]))
            asked = _layer_sites(model, layer, batch, seq_len, again, spared)
            if model.lora_rank:
                asked = chain(frozen(asked), adapter_sites(model, layer, batch, seq_len, again))
            for site in asked:
                alike[site.kind, tuple(site.dims.items()), site.recomputed, site.experts] += site.count
    sites = [Site(kind, n, dict(d), again, call) for (kind, d, again, call), n in alike.items() if n]
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
    sites.append(Site("parameters", 1, model.parameters(rows, stage)))
    sites += model.scale_sites(len(layers), len(predictions))
    if not model.lora_rank:
        return sites
    trained = trained_parameters(model, rows, stage)
    return [*frozen(sites, trained, spared_by_packing(model, layers), model.lora_whole)]


def _layer_sites(
    model: DecoderModel, layer: int, batch: int, seq_len: int, again: bool, spared: bool
) -> Iterator[Site]:
    """What a layer asks of a strategy for one batch; the other arguments are those of
    :meth:`FeedForward.sites`."""
    mixer, feeding = model.mixing(layer), model.feeding(layer)
    between = {"B": batch, "L": seq_len, "H": model.hidden, "F": mixer.width(model)}
    once = {"gathered_once": 1} if mixer.gathers_once(model) else {}
    kept = {"kept": 1} if model.keeps_operators else {}
    if not isinstance(mixer, LatentAttention):  # which opens otherwise
        yield Site("linear_in", 1, between | once | model.gathered_dims, again)
    yield Site("linear_out", 1, between | kept, again and not (spared and feeding is None))
    if feeding is not None:
        yield from feeding.sites(model, batch, seq_len, again, spared)
    yield from mixer.sites(model, batch, seq_len, again)


def stage_parameters(model: DecoderModel, rows: int, stage: Stage) -> dict[str, int]:
    """Counts of a stage's parameters: all ``elements``, of them those that can be ``split`` over features
    and vocabulary, and of these the ``vocabulary``'s, which has that many ``rows``, those of each
    ``mlp``, and the ``key_value`` ones that grouped heads share, with the number of these heads; those of
    routed ``experts`` are not among those that can be split."""
    h, predictions = model.hidden, model.prediction_layers(stage)
    layers = [*stage.layers(model.layers), *predictions]
    blocks: Counter[str] = Counter()
    feeding = [each for i in layers if (each := model.feeding(i)) is not None]
    for block in (*map(model.mixing, layers), *feeding):
        blocks.update(block.parameters(model))
    experts = blocks["experts"]
    of_norm = h * (2 if model.norm == "layer" else 1) if model.weighted_norms else 0
    of_block = 2 if model.norms == "around" else 1
    normed = len(layers) + (0 if model.norms == "shared" else len(feeding))
    whole = of_norm * (of_block * normed + stage.last) + blocks["whole"]
    whole += (3 * of_norm + 2 * h * h) * len(predictions)
    if model.biases:
        whole += h * len(layers)  # of the projections that close mixers
    if stage.first:
        whole += (model.learned_positions or 0) * h
    tables = stage.first or stage.last if model.tied else stage.first + stage.last
    if predictions and not model.tied:
        tables += not stage.first  # the copy of the embedding
    vocabulary = tables * rows * h
    split = blocks["split"] + vocabulary
    counts = {"elements": split + whole + experts, "split": split, "vocabulary": vocabulary}
    counts["mlp"] = blocks["mlp"]
    if experts:
        counts["experts"] = experts
    if model.kv_heads is not None and blocks["key_value"]:
        counts |= {"key_value": blocks["key_value"], "kv_heads": model.kv_heads}
    return counts
