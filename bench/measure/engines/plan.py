"""The plan of a cell: the check of its sizes, and a closed form of the bytes that each of its ranks sends."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from spbench import impls
from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.measure.clusters.card_kernels import cannot_run
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines import cell_schedule, unlike_ranks
from spbench.bench.measure.trace.meter import CommunicationMeter, as_number


@dataclass(frozen=True)
class RankClass:
    """Global ranks of a cell that run the same program, so that the trace of one rank holds for all.

    Attributes:
        stage: the pipeline stage of these ranks.
        coordinates: the first rank's coordinates, by the strategy's axes.
        ranks: the global ranks; the first is traced.
    """

    stage: impls.Stage
    coordinates: Mapping[str, int]
    ranks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The rank of the class that is traced."""
        return self.ranks[0]


def rank_classes(cell: Cell) -> list[RankClass]:
    """The classes of all ranks of a cell: by pipeline stage, then along each axis of the strategy by
    :meth:`Strategy.roles` and by work, except on an axis where one rank's step contains the work of all ranks
    (:func:`marked_axis`). The first class of a stage sends most. The first rank of a class has the experts
    with most tokens (:func:`fullest_rank`), or has most weights whole if ranks share out whole weights."""
    sizes, strategy, marked = cell.mesh_sizes, impls.nesting(cell.strategy), unlike_ranks.marked_axis(cell)
    along_axes, rows = [], unlike_ranks.expert_rows(cell)
    for axis in strategy.axes:
        sets = strategy.roles(axis, sizes[axis])
        along_axes.append(
            sets if axis == marked else unlike_ranks.roles_by_load(sets, unlike_ranks.loads_along(cell, axis))
        )
    classes = []
    for stage in range(sizes["pp"]):
        for roles in itertools.product(*along_axes):
            members = dict(zip(strategy.axes, roles, strict=True))
            first = {axis: coordinates[0] for axis, coordinates in members.items()}
            ranks = [*impls.global_ranks(sizes, {"pp": [stage], **members})]
            if rows is not None:
                fullest = unlike_ranks.fullest_rank(cell, ranks, rows, marked)
                ranks.insert(0, ranks.pop(ranks.index(fullest)))
                first = {axis: impls.Place.of_rank(sizes, fullest).coordinates[axis] for axis in first}
            elif shares_whole_weights(cell):
                ranks.insert(0, ranks.pop(_heaviest(cell, ranks)))
            classes.append(RankClass(impls.Stage(stage, sizes["pp"]), first, tuple(ranks)))
    return classes


def shares_whole_weights(cell: Cell) -> bool:
    """Whether ranks of a class have unlike weights, or gradients of weights, whole."""
    if cell.training.step == "inference":
        return False
    backend = impls.backend_class(cell.training.backend)
    return backend.shares_whole_weights(backend_options(cell)) and cell.sizes.world > cell.sizes.pp


def _heaviest(cell: Cell, ranks: Sequence[int]) -> int:
    """The index, among the ranks of a class, of the rank that has most weights, or gradients, whole."""
    step = planned_step(cell, ranks[0], [])
    places = [impls.Place.of_rank(cell.mesh_sizes, rank) for rank in ranks]
    held = impls.backend_class(cell.training.backend).updated_elements(step, places)
    return held.index(max(held))


@dataclass(frozen=True)
class Plan:
    """A cell whose sizes have been checked.

    Attributes:
        classes: the classes of the cell's ranks.
        traffic: for each class, the closed form of the messages that a rank sends in a step.
        sizes: the number of ranks along each axis, in the order of the mesh.
        uneven: the cell, if ranks of a class send different amounts, so that ``traffic`` holds only for the
            first rank of each class; else None.
        has_formula: whether there is a closed form; there is none of a user's step.
    """

    classes: list[RankClass]
    traffic: list[list[impls.Traffic]]
    sizes: Mapping[str, int]
    uneven: Cell | None = None
    has_formula: bool = True

    def class_of(self, rank: int) -> RankClass:
        """The class that a global rank belongs to."""
        return next(each for each in self.classes if rank in each.ranks)

    def traffic_of(self, rank: int) -> list[impls.Traffic]:
        """The closed form of the messages that a global rank sends in a step."""
        if self.uneven is not None and rank not in [each.first for each in self.classes]:
            return closed_form(self.uneven, rank)
        return next(sent for each, sent in zip(self.classes, self.traffic, strict=True) if rank in each.ranks)

    def formula(self, rank: int) -> list[dict[str, Any]]:
        """The messages that a global rank sends by the closed form, as rows: phase, purpose, collective, axis
        (the group's axes, as "dp_sp"), count, payload_bytes (of one call) and sent_bytes (of all calls)."""
        return [
            {
                "phase": t.phase,
                "purpose": t.purpose,
                "collective": t.collective,
                "axis": self._axis(t),
                "count": t.count,
                "payload_bytes": t.payload_bytes,
                "sent_bytes": as_number(t.sent_bytes(t.group_size(self.sizes))),
            }
            for t in self.traffic_of(rank)
        ]

    def difference(
        self, meter: CommunicationMeter, rank: int, *, has_values: bool = False
    ) -> list[dict[str, Any]]:
        """Rows for each phase, collective and axis in which a rank's meter and the closed form have different
        bytes; empty if meter and closed form agree exactly, or there is no closed form.

        Args:
            has_values: whether tensors have values; then messages whose bytes depend on values are left out.
        """
        if not self.has_formula:
            return []
        unknown = {
            (t.phase, t.collective, self._axis(t)) for t in self.traffic_of(rank) if t.varies and has_values
        }
        expected: Counter[tuple[str, str, str]] = Counter()
        for t in self.traffic_of(rank):
            expected[t.phase, t.collective, self._axis(t)] += t.sent_bytes(t.group_size(self.sizes))  # type: ignore[assignment]
        metered = meter.sent_bytes_by_axis()
        return [
            {
                "rank": rank,
                "phase": phase,
                "collective": collective,
                "axis": axis,
                "formula_bytes": as_number(Fraction(expected[phase, collective, axis])),
                "metered_bytes": as_number(metered.get((phase, collective, axis), Fraction(0))),
            }
            for phase, collective, axis in sorted((expected.keys() | metered.keys()) - unknown)
            if expected[phase, collective, axis] != metered.get((phase, collective, axis), 0)
        ]

    def _axis(self, entry: impls.Traffic) -> str:
        return impls.group_name(entry.axes, self.sizes)


def plan_of_step(cell: Cell, ranks: Sequence[Sequence[int]]) -> Plan:
    """The plan of a user's step; ``ranks`` are those of each class."""
    classes = [RankClass(impls.Stage(), {}, tuple(each)) for each in ranks]
    return Plan(classes, [[] for _ in classes], cell.mesh_sizes, has_formula=False)


def planned_strategy(cell: Cell, coordinates: Mapping[str, int] | None = None) -> impls.Strategy:
    """The cell's strategy without process groups, which checks sizes and has the closed forms of the messages
    of the rank at these coordinates. An axis that ``coordinates`` leaves out has the coordinate 0.

    Raises:
        Unsupported: an axis that the strategy does not use has more than one rank.
    """
    nested, sizes = impls.nesting(cell.strategy), cell.mesh_sizes
    for axis in impls.unused_axes(nested.axes, sizes):
        mend = f"give the ranks to {nested.axes[0]}" if nested.axes else "use one rank"
        raise impls.Unsupported(f"{nested.name} does not use the axis {axis}", mend)
    strategy = nested.configured(impls.Place(sizes, coordinates or {}), cell.strategy_options)
    strategy.pack(impls.model_preset(*cell.model_arguments).attended(cell.seq_len or 1))
    return strategy


def composition(cell: Cell, place: impls.Place) -> impls.Composition:
    """The replica and the pipeline stages of the rank at a place of the mesh."""
    return impls.Composition(place, cell.training.virtual_stages, cell.training.stage_layers or ())


def plan(cell: Cell) -> Plan:
    """Check a cell, and return its rank classes with the closed forms of the messages that they send. Of a
    user's step each rank is a class, because only traces tell which ranks are alike.

    Raises:
        Unsupported: see :func:`check_sizes`.
    """
    if cell.strategy == OWN_STEP:
        return plan_of_step(cell, [[rank] for rank in range(cell.sizes.world)])
    classes = cell_schedule.with_mends(check_sizes, cell)
    traffic = [closed_form(cell, each.first) for each in classes]
    uneven = unlike_ranks.expert_rows(cell) is not None or shares_whole_weights(cell)
    return Plan(classes, traffic, cell.mesh_sizes, cell if uneven else None)


def check_sizes(cell: Cell) -> list[RankClass]:
    """Check a cell, without building its modules; returns the classes of its ranks.

    Raises:
        Unsupported: the strategy, card or dispatcher cannot run the cell, or a size does not divide another.
    """
    strategy, model = planned_strategy(cell), impls.model_preset(*cell.model_arguments)
    cluster = load_cluster(cell.cluster)
    if why := cannot_run(cluster.device, model.attention_kernel):
        raise impls.Unsupported(*why)
    ranks, of_node = getattr(model, "node_ranks", 0), cluster.devices_per_node
    dispatcher = impls.all_dispatchers()[getattr(model, "dispatcher", "all_to_all")]
    if ranks > of_node > 1 and not dispatcher.heeds_capacity:  # those that sum rows within nodes
        raise impls.Unsupported(
            f"node_ranks {ranks} is more than the {of_node} devices of a node of {cell.cluster}",
            f"set model_options.node_ranks to {of_node}",
        )
    for each in strategy.nested():
        group = each.place.members(*each.axes) if getattr(each.options, "fused_exchange", False) else []
        if of_node > 1 and len({rank // of_node for rank in group}) > 1:
            raise impls.Unsupported(
                f"fused_exchange of {each.name} needs {len(group)} ranks in one node, which has {of_node}",
                "leave strategy_options.fused_exchange out, or give the axis fewer ranks",
            )
    strategy.check(
        _sites(cell, strategy, impls.Stage()) + impls.training_sites(impls.PRECISIONS[cell.precision])
    )
    if cell.training.step == "inference":
        cell_schedule.check_inference(cell)
    elif not model.has_weights:
        raise impls.Unsupported(f"{cell.model} has no weights to train", "set training: {step: inference}")
    backend = impls.backend_class(cell.training.backend)
    if not backend.freezes and any(
        s.kind == "frozen_parameters" for s in _sites(cell, strategy, impls.Stage())
    ):
        raise impls.Unsupported(
            f"the backend {backend.name} has trained and frozen weights in one flat tensor",
            "use zero3, or leave lora_rank or index_n_heads out",
        )
    classes = rank_classes(cell)
    cell_schedule.check_schedule(cell)
    if cell.sizes.pp > 1:
        stages = (
            composition(cell, impls.Place.of_rank(cell.mesh_sizes, each.first)).stages for each in classes
        )
        asked = [s.kind for stage in itertools.chain(*stages) for s in _sites(cell, strategy, stage)]
        backend.check_stages(backend_options(cell), "tied_embedding" in asked)
    return classes


def _sites(cell: Cell, strategy: impls.Strategy, stage: impls.Stage) -> list[impls.Site]:
    """The places in a stage's model (sites) at which a micro-batch of one replica calls the strategy."""
    (batch, seq_len), model = cell.shape, cell_schedule.played_model(cell)
    return list(
        model.sites(batch // cell_schedule.batch_parts(cell), seq_len, strategy.vocabulary_parts, stage)
    )


def closed_form(cell: Cell, rank: int) -> list[impls.Traffic]:
    """The closed form of the messages that a global rank of a checked cell sends in a step; no entry of it
    has 0 bytes."""
    precision, training, sizes = impls.PRECISIONS[cell.precision], cell.training, cell.mesh_sizes
    strategy, backend = planned_strategy(cell), impls.backend_class(training.backend)
    around = composition(cell, impls.Place.of_rank(sizes, rank))
    asked = [_sites(cell, strategy, stage) for stage in around.stages]
    # these sites count once a step, however many stages the rank has
    asked[0] += impls.training_sites(precision, [*itertools.chain(*asked)])
    step = planned_step(cell, rank, [*itertools.chain(*asked)])
    width, of_tied = precision.parameters.itemsize, partial(backend.tied_bytes, step)
    of_stages = (
        impls.composed_traffic(of_stage, step.strategy, stage, training.micro_batches, width, of_tied)
        for of_stage, stage in zip(asked, around.stages, strict=True)
    )
    entries = [*itertools.chain(*of_stages), *backend.traffic(step)]
    if training.step == "inference":
        entries = [t for t in entries if t.phase == "forward"]
    return [t for t in entries if t.sent_bytes(t.group_size(sizes))]


def planned_step(cell: Cell, rank: int, asked: Sequence[impls.Site]) -> impls.PlannedStep:
    """The facts about a global rank on which the closed forms of its backend depend.

    Args:
        asked: the sites in the rank's stages at which the strategy is used.
    """
    place, training = impls.Place.of_rank(cell.mesh_sizes, rank), cell.training
    role, around = planned_strategy(cell, place.coordinates), composition(cell, place)
    build = partial(_without_values, cell_schedule.played_model(cell), role, cell.shape[1], around)
    sums, options = impls.planned_sums(asked, role, cell.sizes.dp), backend_options(cell)
    precision = impls.PRECISIONS[cell.precision]
    order = partial(cell_schedule.passes_of, cell, around)
    return impls.PlannedStep(sums, training.micro_batches, precision, role, around, build, order, options)


def backend_options(cell: Cell) -> impls.Options:
    """The options of a cell's backend: the defaults, with ``training.backend_options`` set."""
    backend = impls.backend_class(cell.training.backend)
    return impls.set_options(backend.options_type(), cell.training.backend_options, f"backend {backend.name}")


def _without_values(
    model: impls.Model, strategy: impls.Strategy, seq_len: int, around: impls.Composition
) -> nn.Module:
    """The module of a rank on the meta device, whose parameters have shapes but no values."""
    with torch.device("meta"):
        return impls.rank_module(partial(model.build, strategy, seq_len), around)


def stage_module(cell: Cell, ranks: RankClass) -> nn.Module:
    """The module of the first rank of a class, on the meta device."""
    around = composition(cell, impls.Place.of_rank(cell.mesh_sizes, ranks.first))
    role = planned_strategy(cell, ranks.coordinates)
    return _without_values(cell_schedule.played_model(cell), role, cell.shape[1], around)


def model_parameters(cell: Cell) -> int:
    """The number of parameters of the whole model, with the padding of its vocabulary for the strategy."""
    parts = planned_strategy(cell).vocabulary_parts
    sites = impls.model_preset(*cell.model_arguments).sites(1, cell.seq_len or 1, parts)
    return sum(s.dims["elements"] for s in sites if s.kind in ("parameters", "frozen_parameters"))
