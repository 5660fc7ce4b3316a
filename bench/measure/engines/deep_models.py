"""Models of few layers whose traces that of a deep one is put together from.

A layer takes as long to trace as any other, and the layers of a model are alike. So few are traced: models of
3 and 5 layers, from which that of all layers is put together, and one of 4, which is the proof: what is put
together for 4 layers must equal it in every field. If it does not, or a list of the two is no list of like
blocks, the whole model is traced. A guess takes the models of 3 and 5 layers, and does without the proof.

What the proof cannot show is a limit that 5 layers do not reach. So nothing may grow with the number of
layers that could have one (:mod:`measure.engines.deepened_traces`), unless the backend says that it
cuts its buffers alike in all four models (:meth:`Backend.cuts`); if it does not, the whole one is traced at
once, and guessed as if it did. A model says how often its kinds of layers repeat (:attr:`Model.period`), and
it is trusted that a layer does not depend on its number otherwise. A test compares traces with whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, NamedTuple

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.plan import planned_step
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backend_class

#: how a trace is made; see :func:`measure.engines.tracing.trace`
Effort = Literal["whole", "proved", "guess"]
#: the layers of the shallowest model: with fewer, a first or last one would be beside each other
_FEWEST = 3
#: the fewest layers of which tracing all takes longer than tracing 3 and 5, and 4 for the proof
LEAST: dict[Effort, int] = {"proved": 20, "guess": 9}


class FewLayers(NamedTuple):
    """Cells of few layers by whose traces that of a cell is put together.

    Attributes:
        sources: two, of which the second has two layers, or runs of layers that repeat, more.
        proof: of one more than the first; None: nothing is proved.
        more: by how many layers, or runs, the cell has more than the first.
        grows: whether buffers and messages of all layers may grow, outside forward and backward.
    """

    sources: tuple[Cell, Cell]
    proof: Cell | None
    more: int
    grows: bool


def stage_layers(cell: Cell) -> tuple[int, int]:
    """(layers of a stage, in runs that are computed again together; layers of the model for one of these);
    0 where a model has no number of layers, or its kinds of layers do not repeat in each stage alike."""
    model = model_preset(*cell.model_arguments)
    together = getattr(model, "recompute_layers", 1) if getattr(model, "recomputes_layers", False) else 1
    unit = cell.sizes.pp * cell.training.virtual_stages * math.lcm(together, model.period)
    layers = getattr(model, "layers", 0)
    return 0 if model.period > 1 and layers % unit else layers // unit, unit


def with_layers(cell: Cell, layers: int) -> Cell:
    """The cell of a model with that many layers."""
    return cell.model_copy(update={"model_options": {**cell.model_options, "layers": layers}})


def few_layers(cell: Cell, rank: int, effort: Effort) -> FewLayers | None:
    """The cells that the trace of a rank is put together from; None where all layers are traced as quickly.

    Raises:
        NotAlike: the backend cuts buffers of all layers otherwise than those of few.
        Unsupported: the strategy cannot run so few layers.
    """
    layers, unit = stage_layers(cell)
    if effort == "whole" or layers < LEAST[effort] or cell.training.stage_layers is not None:
        return None
    left_over = getattr(model_preset(*cell.model_arguments), "layers", 0) - layers * unit
    few, proof, some = (with_layers(cell, n * unit + left_over) for n in range(_FEWEST, _FEWEST + 3))
    cuts, more = _cuts(few, rank), layers - _FEWEST
    if effort == "guess":
        return FewLayers((few, some), None, more, cuts is not None)
    if any(_cuts(each, rank) != cuts for each in (proof, some, cell)):
        raise NotAlike("its backend cuts buffers of all layers otherwise than those of few")
    return FewLayers((few, some), proof, more, cuts is not None)


def _cuts(cell: Cell, rank: int) -> Hashable:
    if cell.training.step == "inference":
        return None
    return backend_class(cell.training.backend).cuts(planned_step(cell, rank, ()))
