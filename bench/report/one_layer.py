"""One layer of a model on virtual ranks: its forward and backward alone, and the time they take.

What runs is the largest part of the model that has no loss, built and called as verification does it, with
the cell's strategy and sizes. Neither the word embedding, nor the head, nor the sums of gradients, nor the
optimizer are in it: what is left is what a strategy does in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.engines.plan import model_parameters, plan, rank_classes
from spbench.bench.engines.virtual import fake_mesh, no_cyclic_collection
from spbench.bench.meters.recorder import Recorder
from spbench.bench.meters.torch_internals import FakeTensorMode
from spbench.bench.simulator.program import Program
from spbench.bench.simulator.simulate import simulate
from spbench.bench.simulator.timeline import Timeline
from spbench.impls.axes import Place
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import Model, ModelPart, model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.step import PRECISIONS, default_dtype

#: the phases of its program
FORWARD, BACKWARD = "forward", "backward"


def layer_of(model: Model) -> str:
    """The name of the part that is a layer.

    Raises:
        Unsupported: the model has no part but itself.
    """
    parts = [name for name, part in model.parts().items() if "loss" not in part.output_dims]
    if not parts:
        raise Unsupported("the model has no part without a loss", "use another model")
    return parts[-1]


def layer_timeline(cell: Cell) -> Timeline:
    """Forward and backward of one layer of the cell's model on all of the cell's ranks, simulated on its
    cluster.

    Raises:
        Unsupported: the strategy cannot run these sizes, or the model has no layer that can be run alone.
        RatesUnknown: the cluster lacks a figure.
    """
    plan(cell)
    classes = rank_classes(cell)
    return simulate(
        [_program(cell, each.first) for each in classes],
        [each.ranks for each in classes],
        load_cluster(cell.cluster),
        cell.precision,
        parameters=model_parameters(cell),
    )


def _program(cell: Cell, rank: int) -> Program:
    """What a rank does in the layer."""
    model, dtype = model_preset(*cell.model_arguments), PRECISIONS[cell.precision].parameters
    part = model.parts()[layer_of(model)]
    with fake_mesh(cell.mesh_sizes, rank) as mesh, no_cyclic_collection(), FakeTensorMode():
        strategy = nesting(cell.strategy).configured(Place.on(mesh), cell.strategy_options)
        with default_dtype(dtype):
            module = part.build(strategy, cell.shape[1])
        inputs = _inputs(cell, part, strategy, dtype)
        recorder = Recorder(mesh, events=True)
        with recorder:
            with recorder.phase(FORWARD):
                outputs: Mapping[str, Tensor] = module(inputs)
            gradients = [torch.empty_like(x) for x in outputs.values()]
            with recorder.phase(BACKWARD):
                torch.autograd.backward([*outputs.values()], gradients)
        recorder.memory.stop()
    assert recorder.events is not None
    return recorder.events.program()


def _inputs(cell: Cell, part: ModelPart, strategy: Strategy, dtype: torch.dtype) -> dict[str, Tensor]:
    """The rank's part of the layer's inputs, which get gradients as those of a layer between others do."""
    found = {}
    for name, whole in part.inputs(*cell.shape, torch.Generator()).items():
        x = strategy.shard(whole, part.sequence_dims[name]).clone()
        found[name] = x.to(dtype).requires_grad_() if x.is_floating_point() else x
    return found
