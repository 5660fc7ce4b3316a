"""Models of few layers whose traces that of a deep one is put together from.

A layer takes as long to trace as any other, and the layers of a model are alike. So few are traced: models of
3 and 5 layers, from which that of all layers is put together, and one of 4, which is the proof: what is put
together for 4 layers must equal it in every field. If it does not, or a list of the two is no list of like
blocks, the whole model is traced.

What the proof cannot show is a limit that 5 layers do not reach. So nothing may grow with the number of
layers that could have one (:mod:`measure.engines.deepened_traces`), unless the backend says that it
cuts its buffers alike in all four models (:meth:`Backend.cuts`); if it does not, the whole one is traced at
once. A model says how often its kinds of layers repeat (:attr:`Model.period`), and it is trusted that a layer
does not depend on its number otherwise. A test compares traces with whole ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import replace

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.deepened_traces import DeepTrace
from spbench.bench.measure.engines.pipeline_stages import same
from spbench.bench.measure.engines.plan import planned_step
from spbench.bench.measure.engines.repeating_runs import NotAlike
from spbench.bench.measure.engines.traces import Trace
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backend_class

#: the layers of the shallowest model: with fewer, a first or last one would be beside each other
_FEWEST = 3
#: the fewest layers of which tracing all takes longer than tracing 3, 4 and 5
LEAST = 20

_log = logging.getLogger(__name__)


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


def deep_trace(cell: Cell, rank: int, traced: Callable[[Cell], Trace]) -> Trace:
    """The trace of a cell, put together from those of few layers where that is quicker and exact.

    Args:
        traced: traces the rank of a cell.
    """
    layers, unit = stage_layers(cell)
    if layers >= LEAST and cell.training.stage_layers is None:
        try:
            return _put_together(cell, rank, layers, unit, traced)
        except (NotAlike, Unsupported) as error:
            _log.info("%s is traced with all layers: %s", cell.key, error)
    return traced(cell)


def _put_together(cell: Cell, rank: int, layers: int, unit: int, traced: Callable[[Cell], Trace]) -> Trace:
    """As :func:`deep_trace`.

    Raises:
        NotAlike: it is not exact.
        Unsupported: the strategy cannot run so few layers.
    """
    more = getattr(model_preset(*cell.model_arguments), "layers", 0) - layers * unit
    few, proof, some = (with_layers(cell, n * unit + more) for n in range(_FEWEST, _FEWEST + 3))
    cuts = _cuts(few, rank)
    if any(_cuts(each, rank) != cuts for each in (proof, some, cell)):
        raise NotAlike("its backend cuts buffers of all layers otherwise than those of few")
    deep = DeepTrace(traced(few), traced(some), grows=cuts is not None)
    ours, theirs = deep.by(1), traced(proof)
    if not same(ours, theirs) or ours.memory.places != theirs.memory.places:
        raise NotAlike("what is put together is not what is traced")
    return replace(deep.by(layers - _FEWEST), cell=cell)


def _cuts(cell: Cell, rank: int) -> Hashable:
    if cell.training.step == "inference":
        return None
    return backend_class(cell.training.backend).cuts(planned_step(cell, rank, ()))
