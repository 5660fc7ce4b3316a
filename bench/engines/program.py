"""What every engine runs: the plan of a cell, and its training step under the meters."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bench.cell import Cell
from bench.meters.communication import CommunicationMeter, as_number
from bench.meters.recorder import Recorder
from impls.communication import Traffic
from impls.models.model import Model, model_preset
from impls.strategy import MESH_AXES, Strategy, Unsupported, strategy_class
from impls.training import PRECISIONS, Training, default_dtype, training_sites


@dataclass(frozen=True)
class Plan:
    """A cell whose sizes have been checked.

    Attributes:
        model: the model with the cell's options.
        traffic: the strategy's closed form of what a step sends.
        size: ranks that the strategy spreads over.
    """

    model: Model
    traffic: list[Traffic]
    size: int

    def formula(self) -> list[dict[str, Any]]:
        """The closed form as rows: phase, purpose, collective, count, payload_bytes (of one) and sent_bytes
        (of one rank, all of them)."""
        return [{**asdict(t), "sent_bytes": as_number(t.sent_bytes(self.size))} for t in self.traffic]

    def difference(self, meter: CommunicationMeter) -> list[dict[str, Any]]:
        """Where the meter saw other bytes than the closed form says; empty where they agree exactly."""
        expected: Counter[tuple[str, str]] = Counter()
        metered: Counter[tuple[str, str]] = Counter()
        for t in self.traffic:
            expected[t.phase, t.collective] += t.sent_bytes(self.size)  # type: ignore[assignment]
        for (phase, collective), sent in meter.sent_bytes().items():
            metered[phase, collective] += sent  # type: ignore[assignment]
        return [
            {
                "phase": phase,
                "collective": collective,
                "formula_bytes": as_number(Fraction(expected[phase, collective])),
                "metered_bytes": as_number(Fraction(metered[phase, collective])),
            }
            for phase, collective in sorted(expected.keys() | metered.keys())
            if expected[phase, collective] != metered[phase, collective]
        ]


def planned_strategy(cell: Cell) -> Strategy:
    """The cell's strategy without process groups, for checks and closed forms.

    Raises:
        Unsupported: an axis has more than one rank that the strategy does not use.
    """
    cls = strategy_class(cell.strategy)
    for axis in MESH_AXES:
        if axis != cls.axis and getattr(cell.sizes, axis) > 1:
            raise Unsupported(
                f"{cls.name} does not use the axis {axis}",
                f"give the ranks to {cls.axis}" if cls.axis else "use one rank",
            )
    return cls(planned_size=cell.sizes.world, **cell.strategy_options)


def plan(cell: Cell) -> Plan:
    """Check a cell and write down what it should send.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    strategy, model = planned_strategy(cell), model_preset(cell.model, cell.model_options)
    precision = PRECISIONS[cell.precision]
    sites = model.sites(*cell.shape, strategy.vocabulary_parts) + training_sites(precision)
    strategy.check(sites)
    traffic = strategy.communication(sites, precision.parameters.itemsize)
    return Plan(model, [t for t in traffic if t.sent_bytes(strategy.size)], strategy.size)


def mesh_axes(mesh: DeviceMesh) -> dict[str, str]:
    """The mesh axis of each process group of more than one rank, by the group's name."""
    groups = {axis: mesh.get_group(axis) for axis in MESH_AXES}
    return {group.group_name: axis for axis, group in groups.items() if group.size() > 1}


def set_up(
    cell: Cell, mesh: DeviceMesh, generator: torch.Generator | None = None
) -> tuple[Training, dict[str, Tensor]]:
    """Build the training of a cell on this rank, and this rank's inputs."""
    model, precision = model_preset(cell.model, cell.model_options), PRECISIONS[cell.precision]
    strategy = strategy_class(cell.strategy)(mesh, **cell.strategy_options)
    with default_dtype(precision.parameters):
        module = model.build(strategy, cell.shape[1])
    training = Training(
        module,
        strategy,
        precision,
        moments=cell.training.moments,
        gradients=cell.training.gradients,
    )
    inputs = {
        name: strategy.shard(whole, model.sequence_dims[name])
        for name, whole in model.inputs(*cell.shape, generator).items()
    }
    if cell.training.batch_on_device == "part":
        inputs = {name: part.clone() for name, part in inputs.items()}
    return training, inputs


def record_step(
    cell: Cell, mesh: DeviceMesh, recorder: Recorder, generator: torch.Generator | None = None
) -> tuple[Training, dict[str, Tensor]]:
    """Set up and run one training step under an entered recorder; returns what further steps need."""
    training, inputs = set_up(cell, mesh, generator)
    memory = recorder.memory
    memory.tag(training.module.parameters(), "parameters")
    memory.tag(training.gradients.tensors(), "gradients")
    memory.tag(training.optimizer.tensors(), "optimizer_state", keep=True)
    memory.tag(inputs.values(), "inputs")
    training.step(inputs, recorder.phase)
    return training, inputs
