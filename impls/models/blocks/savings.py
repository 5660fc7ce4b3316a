"""The changes of a decoder's options that take less memory; see :meth:`Model.savings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spbench.impls.options import Saving

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel


def savings(model: DecoderModel, stages: int) -> Iterator[Saving]:
    """The cheapest first; ``stages`` are those of the pipeline."""
    if model.cross_entropy != "in_place":
        yield Saving({"cross_entropy": "in_place"}, "no float32 copy of the logits (TransformerEngine's)")
    if not model.loss_tile:
        yield Saving(_loss_in_tiles(model), "head and loss in tiles, no whole logits")
    in_tiles = {} if model.keeps_operators else _in_tiles(model)
    if in_tiles and not model.mlp_tile:
        yield Saving(in_tiles, "backward runs each tile of an MLP again; the loss is in tiles too")
    here = model.layers // stages
    if not model.recomputes_layers:
        if model.recompute == "none":
            yield Saving({"recompute": "selective"}, "backward runs the inside of attention again")
        for layers in dict.fromkeys((here // 4, here // 2, here * 3 // 4)):
            if layers:
                block = {"recompute": "full", "recompute_method": "block", "recompute_layers": layers}
                yield Saving(block, f"backward runs {layers} of a stage's {here} layers again")
        yield Saving({"recompute": "full"}, "backward runs all layers again")
        on_host = {"recompute": "full", "checkpoints": "host"}
        yield Saving(on_host, "backward runs all layers again, and their inputs wait on the host")
        if not model.mlp_tile:
            yield Saving({**on_host, **in_tiles}, "so, and MLP and loss are in tiles")
        return
    if model.checkpoints == "device" and not model.keeps_operators:
        yield Saving({"checkpoints": "host"}, "the inputs of layers wait on the host")
        if not model.mlp_tile:
            yield Saving({"checkpoints": "host", **in_tiles}, "so, and MLP and loss are in tiles")
    if model.recompute_method == "uniform":
        for layers in (2 * model.recompute_layers, 4 * model.recompute_layers):
            if layers < here:
                yield Saving({"recompute_layers": layers}, f"one input is kept for {layers} layers")
    else:
        uniform = {"recompute_method": "uniform", "recompute_layers": 1}
        yield Saving(uniform, f"backward runs all layers again, not {model.recompute_layers} of a stage")


def _loss_in_tiles(model: DecoderModel) -> dict[str, Any]:
    """A tile of so many tokens that their logits take up to 1 GiB in float32 (ALST)."""
    tokens = 2**28 // model.vocabulary
    tile = 1 << max(0, tokens.bit_length() - 1)
    return {"loss_tile": tile, "cross_entropy": "in_place"}


def _in_tiles(model: DecoderModel) -> dict[str, Any]:
    """The loss, and MLPs of as many tokens at once as ALST's, ``hidden``."""
    return {"mlp_tile": model.hidden, **({} if model.loss_tile else _loss_in_tiles(model))}
