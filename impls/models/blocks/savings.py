"""The changes of a decoder's options that take less memory; see :meth:`Model.savings`."""

from __future__ import annotations

from collections.abc import Iterator

from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.options import Saving


def savings(model: DecoderOptions, stages: int) -> Iterator[Saving]:
    """The cheapest first; ``stages`` are those of the pipeline."""
    if model.cross_entropy != "in_place":
        yield Saving({"cross_entropy": "in_place"}, "no float32 copy of the logits (TransformerEngine's)")
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
        return
    if model.checkpoints == "device" and not model.keeps_operators:
        yield Saving({"checkpoints": "host"}, "the inputs of layers wait on the host")
    if model.recompute_method == "uniform":
        for layers in (2 * model.recompute_layers, 4 * model.recompute_layers):
            if layers < here:
                yield Saving({"recompute_layers": layers}, f"one input is kept for {layers} layers")
    else:
        uniform = {"recompute_method": "uniform", "recompute_layers": 1}
        yield Saving(uniform, f"backward runs all layers again, not {model.recompute_layers} of a stage")
