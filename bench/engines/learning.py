"""Training runs on real ranks: the losses of each step, on real data.

The same global batches and the same initial weights whatever the strategy and sizes, so that the curves of
two cells differ only by how they compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Learning, Measurement
from spbench.bench.engines import distributed
from spbench.bench.engines.plan import plan
from spbench.bench.engines.setup import build_training, rank_inputs
from spbench.impls.collectives import all_reduce
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import initialize


def learn(cell: Cell) -> Measurement:
    """Train on real ranks, and return the losses of each step; status numerics where one is not finite.

    Raises:
        Unsupported: the strategy cannot run these sizes, or there is no data for the model.
        RankError: a rank failed, ran out of memory or did not answer in time.
    """
    plan(cell)
    model_preset(*cell.model_arguments).batches(*cell.shape, seed=0)
    losses = distributed.launch(cell, losses_of_rank)[0]
    wrong = next((at["step"] for at in losses if not all(map(math.isfinite, at.values()))), None)
    if wrong is not None:
        return Measurement("numerics", f"a loss at step {wrong} is not finite", losses=losses)
    return Measurement(losses=losses)


def losses_of_rank(mesh: DeviceMesh, cell: Cell, cls: type[Strategy] | None = None) -> list[dict[str, float]]:
    """Train on this rank; every rank returns the same :attr:`Measurement.losses`.

    Args:
        cls: the strategy, instead of the registered one of the cell's name.
    """
    asked, model = cell.learning, model_preset(*cell.model_arguments)
    assert asked is not None
    # a sum that threads share rounds otherwise, and how many there are depends on the machine
    torch.set_num_threads(1)
    set_weights = partial(initialize, seed=asked.seed, deviation=asked.deviation)
    training, strategy, around = build_training(cell, mesh, set_weights, cls)
    shares = LossShares(training.module, model.losses, mesh.device_type)
    groups = [strategy.place.group(*strategy.position_axes), around.dp_group, around.pp_group]
    batches = model.batches(*cell.shape, seed=asked.seed)
    curves = []
    for step, batch in zip(range(1, asked.steps + 1), batches, strict=False):
        training.optimizer.set_learning_rate(learning_rate(asked, step))
        on_device = {name: x.to(mesh.device_type) for name, x in batch.items()}
        training.step(rank_inputs(model, strategy, around, on_device))
        losses = shares.take()
        for group in groups:
            all_reduce(losses, group)
        curves.append({"step": step, **dict(zip(model.losses, losses.tolist(), strict=True))})
    return curves


def learning_rate(asked: Learning, step: int) -> float:
    """Of a step, counted from 1."""
    top = max(1, asked.warmup)
    rising, falling = step / top, (asked.steps + 1 - step) / max(1, asked.steps + 1 - top)
    return asked.learning_rate * min(rising, falling)


class LossShares:
    """Adds up what a module's forwards report of each loss: this rank's shares, over micro-batches.

    A stage of a pipeline without losses adds nothing.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], device: str = "cpu"):
        self.names, self.sums = names, torch.zeros(len(names), dtype=torch.float64, device=device)
        module.register_forward_hook(self._add)

    def take(self) -> Tensor:
        """The sums since the last call, in the order of the names."""
        sums, self.sums = self.sums, torch.zeros_like(self.sums)
        return sums

    def _add(self, module: nn.Module, inputs: object, outputs: dict[str, Tensor]) -> None:
        if "loss" in outputs:
            self.sums += torch.stack([outputs[f"{name}_loss"].detach().double() for name in self.names])
