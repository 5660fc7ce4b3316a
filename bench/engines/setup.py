"""What every engine runs: the plan of a cell, and its training step under the meters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.meters.communication import CommunicationMeter, as_number
from spbench.bench.meters.memory import MemoryMeter
from spbench.bench.meters.recorder import Recorder
from spbench.impls.axes import MESH_AXES, Place, global_ranks
from spbench.impls.backends.backend import PlannedStep, planned_sums
from spbench.impls.backends.registry import backend_class
from spbench.impls.collectives import Traffic
from spbench.impls.composition import ONE_STAGE, Composition, Stage, composed_traffic
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Site, Strategy, Unsupported
from spbench.impls.strategies.registry import strategy_class
from spbench.impls.training.inference import Inference
from spbench.impls.training.step import PRECISIONS, Training, default_dtype, initialize, training_sites


@dataclass(frozen=True)
class Plan:
    """A cell whose sizes have been checked.

    Attributes:
        traffic: for each of :func:`alike_ranks`, the closed form of what a rank sends in a step, each entry
            with the size of the group it goes to.
    """

    traffic: list[list[tuple[Traffic, int]]]

    def formula(self, which: int = 0) -> list[dict[str, Any]]:
        """The closed form as rows: phase, purpose, collective, count, payload_bytes (of one) and sent_bytes
        (of one rank, all of them)."""
        return [{**asdict(t), "sent_bytes": as_number(t.sent_bytes(n))} for t, n in self.traffic[which]]

    def difference(self, meter: CommunicationMeter, which: int = 0) -> list[dict[str, Any]]:
        """Where the meter saw other bytes than the closed form says; empty where they agree exactly."""
        expected: Counter[tuple[str, str]] = Counter()
        metered: Counter[tuple[str, str]] = Counter()
        for t, size in self.traffic[which]:
            expected[t.phase, t.collective] += t.sent_bytes(size)  # type: ignore[assignment]
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


def planned_strategy(cell: Cell, coordinates: Mapping[str, int] | None = None) -> Strategy:
    """The cell's strategy without process groups, for checks, and for closed forms of what the rank at these
    coordinates sends; at 0 along the axes that are left out.

    Raises:
        Unsupported: an axis has more than one rank that the strategy does not use.
    """
    cls = strategy_class(cell.strategy)
    for axis in cls.unused_axes(cell.sizes.by_axis):
        raise Unsupported(
            f"{cls.name} does not use the axis {axis}",
            f"give the ranks to {cls.axes[0]}" if cls.axes else "use one rank",
        )
    return cls.configured(Place(cell.sizes.by_axis, coordinates or {}), cell.strategy_options)


def plan(cell: Cell) -> Plan:
    """Check a cell and write down what it should send.

    Raises:
        Unsupported: the strategy cannot run these sizes, or the batch or the layers cannot be divided so.
    """
    strategy, model = planned_strategy(cell), model_preset(cell.model, cell.model_options)
    precision, (batch, seq_len) = PRECISIONS[cell.precision], cell.shape
    parts = cell.sizes.dp * cell.training.micro_batches
    if batch % parts:
        below = batch - batch % parts
        raise Unsupported(
            f"batch {batch} cannot be divided into {parts} micro-batches of all replicas",
            f"use {' or '.join(str(n) for n in (below, below + parts) if n)}",
        )

    def sites(stage: Stage) -> list[Site]:
        asked = model.sites(batch // parts, seq_len, strategy.vocabulary_parts, stage)
        return asked + training_sites(precision)

    strategy.check(sites(ONE_STAGE))
    forward_only = cell.training.step == "inference"
    if forward_only:
        check_inference(cell)
    width = precision.parameters.itemsize
    backend, micro_batches = backend_class(cell.training.backend), cell.training.micro_batches
    if cell.sizes.pp > 1 and not backend.pipelined:
        raise Unsupported(
            f"the backend {backend.name} shards a whole model and has no pipeline stages",
            "use pp 1, or the backend ddp",
        )
    traffic = []
    for alike in alike_ranks(cell):
        asked, role = sites(alike.stage), planned_strategy(cell, alike.coordinates)
        sums = planned_sums(asked, role, cell.sizes.dp)
        build = partial(_without_values, model, role, seq_len, alike.stage)
        entries = [
            *composed_traffic(asked, role, alike.stage, micro_batches, width),
            *backend.traffic(PlannedStep(sums, micro_batches, precision, role, build)),
        ]
        if forward_only:
            entries = [(t, size) for t, size in entries if t.phase == "forward"]
        traffic.append([(t, size) for t, size in entries if t.sent_bytes(size)])
    return Plan(traffic)


def check_inference(cell: Cell) -> None:
    """Raise :class:`Unsupported` for settings that a forward pass alone has no use for."""
    training = cell.training
    for given, what in (
        (cell.learning is not None, "learning"),
        (cell.sizes.pp > 1, "pipeline stages"),
        (training.micro_batches > 1, "micro-batches"),
        (training.backend != TrainingOptions().backend, f"backend {training.backend}"),
    ):
        if given:
            raise Unsupported(f"an inference step has no {what}", "leave it out")


@dataclass(frozen=True)
class Alike:
    """Global ranks that run the same program.

    Attributes:
        stage: their pipeline stage.
        coordinates: along the strategy's axes, of the first of them.
    """

    stage: Stage
    coordinates: Mapping[str, int]
    ranks: list[int]


def _without_values(model: Model, strategy: Strategy, seq_len: int, stage: Stage) -> nn.Module:
    """The module of a rank, for the shapes of its parameters."""
    with torch.device("meta"):
        return model.build(strategy, seq_len, stage)


def alike_ranks(cell: Cell) -> list[Alike]:
    """All ranks of a cell, in sets of those that run the same program: by pipeline stage, and within it by
    :meth:`Strategy.roles` along each axis of the strategy."""
    sizes, cls = cell.sizes, strategy_class(cell.strategy)
    along_axes = [cls.roles(axis, sizes.by_axis[axis]) for axis in cls.axes]
    found = []
    for stage in range(sizes.pp):
        for roles in itertools.product(*along_axes):
            members = dict(zip(cls.axes, roles, strict=True))
            first = {axis: coordinates[0] for axis, coordinates in members.items()}
            ranks = list(global_ranks(sizes.by_axis, {"pp": [stage], **members}))
            found.append(Alike(Stage(stage, sizes.pp), first, ranks))
    return found


def telling_set(cell: Cell, rank: int) -> int:
    """Which of :func:`alike_ranks` says most of what is sent in the pipeline stage of a rank: its first."""
    alike = alike_ranks(cell)
    stage = next(a.stage for a in alike if rank in a.ranks)
    return next(which for which, a in enumerate(alike) if a.stage == stage)


def model_parameters(cell: Cell) -> int:
    """Parameters of the whole model, with the padding of its vocabulary that the strategy asks for."""
    parts = planned_strategy(cell).vocabulary_parts
    sites = model_preset(cell.model, cell.model_options).sites(1, cell.seq_len or 1, parts)
    return sum(site.dims["elements"] for site in sites if site.kind == "parameters")


def mesh_axes(mesh: DeviceMesh) -> dict[str, str]:
    """The mesh axis of each process group of more than one rank, by the group's name."""
    groups = {axis: mesh.get_group(axis) for axis in MESH_AXES}
    return {group.group_name: axis for axis, group in groups.items() if group.size() > 1}


def set_up(
    cell: Cell,
    mesh: DeviceMesh,
    generator: torch.Generator | None = None,
    set_weights: Callable[[nn.Module], None] | None = None,
) -> tuple[Training | Inference, dict[str, Tensor]]:
    """Build what a cell runs on this rank, and this rank's inputs, with values from the last two."""
    model = model_preset(cell.model, cell.model_options)
    training: Training | Inference
    left_out: frozenset[str] = frozenset()
    if cell.training.step == "inference":
        module, strategy, around = build_module(cell, mesh, set_weights)
        training, left_out = Inference(module, around), model.targets
    else:
        training, strategy, around = build_training(cell, mesh, set_weights)
    inputs = rank_inputs(model, strategy, around, model.inputs(*cell.shape, generator))
    inputs = {name: part for name, part in inputs.items() if name not in left_out}
    if cell.training.batch_on_device == "part":
        inputs = {name: part.clone() for name, part in inputs.items()}
    return training, inputs


def build_training(
    cell: Cell,
    mesh: DeviceMesh,
    set_weights: Callable[[nn.Module], None] | None = None,
    cls: type[Strategy] | None = None,
) -> tuple[Training, Strategy, Composition]:
    """The training of a cell on this rank, and what it was built with.

    Args:
        set_weights: gives the module its weights, before they are copied or sharded; None: they have none.
        cls: the strategy, instead of the registered one of the cell's name.
    """
    module, strategy, around = build_module(cell, mesh, set_weights, cls)
    training = Training(
        module,
        strategy,
        PRECISIONS[cell.precision],
        moments=cell.training.moments,
        backend=cell.training.backend,
        backend_options=cell.training.backend_options,
        around=around,
        micro_batches=cell.training.micro_batches,
        schedule=cell.training.schedule,
    )
    return training, strategy, around


def build_module(
    cell: Cell,
    mesh: DeviceMesh,
    set_weights: Callable[[nn.Module], None] | None = None,
    cls: type[Strategy] | None = None,
) -> tuple[nn.Module, Strategy, Composition]:
    """The module alone, with the arguments of :func:`build_training`."""
    model, precision = model_preset(cell.model, cell.model_options), PRECISIONS[cell.precision]
    place = Place.on(mesh)
    strategy = (cls or strategy_class(cell.strategy)).configured(place, cell.strategy_options)
    around = Composition(place)
    with default_dtype(precision.parameters):
        module = model.build(strategy, cell.shape[1], around.stage)
    if set_weights is not None:
        set_weights(module)
    return module, strategy, around


def rank_inputs(
    model: Model, strategy: Strategy, around: Composition, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's part of a whole batch (views)."""
    return {
        name: strategy.shard(
            whole if name in model.unbatched else whole.chunk(around.replicas)[around.replica],
            model.sequence_dims[name],
        )
        for name, whole in batch.items()
    }


def record_step(
    cell: Cell,
    mesh: DeviceMesh,
    recorder: Recorder,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> tuple[Training | Inference, dict[str, Tensor]]:
    """Set up and run one step under an entered recorder; returns what further steps need.

    Args:
        seed: give the weights values first, unseen by the recorder; None: there are none (fake tensors).
    """

    def set_weights(module: nn.Module) -> None:
        if seed is not None:
            with recorder.paused():
                initialize(module, seed)

    training, inputs = set_up(cell, mesh, generator, set_weights)
    recorder.communication.axes.update(training.around.place.flattened)
    _tag(recorder.memory, training, inputs)
    training.step(inputs, recorder.phase)
    return training, inputs


def _tag(memory: MemoryMeter, training: Training | Inference, inputs: Mapping[str, Tensor]) -> None:
    """In a function of its own, for a list of tensors that outlives it would keep them alive in the step."""
    for category, tensors in training.held().items():
        memory.tag(tensors, category, keep=True)  # where weights are the masters too, they are parameters
    memory.tag(inputs.values(), "inputs")
