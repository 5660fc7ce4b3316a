"""Data and pipeline parallelism around a strategy: the replica and the pipeline stage of a rank.

A strategy spreads one sample over axes of its own; the axes dp and pp are composed with it.
Data parallel replicas take parts of the batch and sum their gradients. Pipeline stages take runs of layers;
the first and the last stage hold a copy each of the tied word embedding and add up the copies' gradients.

:func:`experts_traffic` is the closed form of blocks of experts, which have the same axes in every strategy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.impls.collectives import add_from_peer, all_reduce
from spbench.impls.dispatchers.dispatcher import all_dispatchers
from spbench.impls.dispatchers.sent_tokens import planned_counts
from spbench.impls.folding import FOLDED_AXES, folds
from spbench.impls.layout import divisors
from spbench.impls.place import ALONE, Place
from spbench.impls.strategies.base import Site, Strategy, Unsupported
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: number ``index`` of ``count``.

    Attributes:
        sizes: the number of layers of each stage; empty: all stages have equally many.
    """

    index: int = 0
    count: int = 1
    sizes: tuple[int, ...] = ()

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which embeds tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which has the head and the loss."""
        return self.index == self.count - 1

    @property
    def tied(self) -> bool:
        """Whether this stage holds one of two copies of a tied embedding."""
        return self.count > 1 and (self.first or self.last)

    def layers(self, total: int) -> range:
        """The numbers of this stage's layers, of ``total`` layers in all.

        Raises:
            Unsupported: the stages do not divide the layers, or ``sizes`` do not add up to ``total``.
        """
        if self.sizes:
            return self._sized(total)
        if total % self.count:
            use = ", ".join(map(str, divisors(total)))
            raise Unsupported(
                f"{total} layers cannot be split over {self.count} pipeline stages", f"use {use}"
            )
        each = total // self.count
        return range(self.index * each, (self.index + 1) * each)

    def _sized(self, total: int) -> range:
        if len(self.sizes) != self.count or sum(self.sizes) != total or not all(self.sizes[1:-1]):
            raise Unsupported(
                f"stage_layers has {len(self.sizes)} stages with {sum(self.sizes)} layers in all",
                f"give {self.count} numbers that make {total}, of which the first and the last may be 0",
            )
        start = sum(self.sizes[: self.index])
        return range(start, start + self.sizes[self.index])


ONE_STAGE = Stage()


class Composition:
    """The replica and the pipeline stage of this rank, and the sums of gradients over replicas.

    Args:
        place: the place of this rank on the mesh.
        virtual_stages: number of runs of layers that a rank holds. The first runs of all ranks come first, in
            the order of ranks, then their second runs, and so on.
        stage_layers: the number of layers of each stage, in the order of the layers; empty: all stages have
            equally many.

    Attributes:
        stage: this rank's number in the pipeline, and the number of ranks.
        stages: the stages that the rank holds; if it holds one, this is :attr:`stage` with ``sizes``.
    """

    def __init__(self, place: Place = ALONE, virtual_stages: int = 1, stage_layers: Sequence[int] = ()):
        self.place = place
        self.dp_group, self.pp_group = place.group("dp"), place.group("pp")
        self.replicas, self.replica = place.size("dp"), place.rank("dp")
        ranks, rank = place.size("pp"), place.rank("pp")
        self.stage = Stage(rank, ranks)
        count, sizes = ranks * virtual_stages, tuple(stage_layers)
        self.stages = tuple(Stage(n * ranks + rank, count, sizes) for n in range(virtual_stages))

    def gradient_group(self, axes: Sequence[str]) -> dist.ProcessGroup | None:
        """The group of ranks over which one collective sums gradients: the replicas and the ranks along
        ``axes`` of a strategy; for ("edp",) only these. None if the group is only this rank. All ranks must
        call this method, and in the same order."""
        return self.place.group(*summed_axes(axes))

    def gradient_mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """The ranks of :meth:`gradient_group` as a mesh of one axis, which may have one rank.

        Raises:
            ValueError: there is no device mesh.
        """
        return self.place.submesh(*summed_axes(axes))

    def reduce(self, gradients: Tensor, axes: Sequence[str]) -> None:
        """Sum gradients in place over the ranks along ``axes`` of a strategy, then over the replicas, unless
        the axes include the replicas."""
        all_reduce(gradients, self.place.group(*axes))
        if not folds(axes):
            all_reduce(gradients, self.dp_group)

    def tied(self, module: nn.Module) -> nn.Parameter | None:
        """This rank's copy of the tied embedding, of which the first and the last stage hold one each. None
        on the stages between, with one stage, and where the head has weights of its own."""
        weight = module.tied if self.stage.tied else None
        assert weight is None or isinstance(weight, nn.Parameter)
        return weight

    def add_tied(
        self,
        module: nn.Module,
        gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad,
    ) -> None:
        """Add up the gradients of the two copies of the tied embedding, in place on both stages that hold it.

        Args:
            gradient: function that returns the tensor that holds a parameter's gradient.
        """
        if (weight := self.tied(module)) is not None:
            held = gradient(weight)
            assert self.pp_group is not None
            assert held is not None
            add_from_peer(held, self.pp_group, self.stage.count - 1 - self.stage.index)


def summed_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes over which one collective sums gradients that have these :meth:`Strategy.partial_axes`: the
    same axes and dp, or only ("edp",), which includes the replicas."""
    return tuple(axes) if folds(axes) else ("dp", *axes)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that are not frozen."""
    return [p for p in module.parameters() if p.requires_grad]


def by_partial_axes(
    parameters: Iterable[nn.Parameter], strategy: Strategy
) -> dict[tuple[str, ...], list[nn.Parameter]]:
    """Parameters in their order, by :meth:`Strategy.partial_axes`; sets with the most axes first."""
    by_axes: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_axes.setdefault(strategy.partial_axes(parameter), []).append(parameter)
    return dict(sorted(by_axes.items(), key=lambda entry: (-len(entry[0]), entry[0])))


def composed_traffic(
    sites: list[Site],
    strategy: Strategy,
    stage: Stage,
    micro_batches: int,
    element_bytes: int,
    tied_bytes: Callable[[int], int],
) -> Iterator[Traffic]:
    """The closed form: yields the messages of a rank of a stage in a step, without the backend's messages
    (:meth:`Backend.traffic`).

    Args:
        sites: the sites of this stage in one micro-batch, and of the step itself (parameters, flags).
        element_bytes: bytes of an element of activations.
        tied_bytes: function from a rank's elements of a tied embedding to the bytes of their gradient.
    """
    for t in strategy.traffic(sites, element_bytes):
        once = t.phase in ("gradient_sync", "optimizer")
        yield t if once else t.times(micro_batches)
    for site in sites:
        if site.kind == "stage_boundary":
            payload = strategy.wire_elements(site) * element_bytes
            if not stage.last:
                yield Traffic("forward", "to the next stage", "send", micro_batches, payload, ("pp",))
            if not stage.first:
                yield Traffic("backward", "to the stage before", "send", micro_batches, payload, ("pp",))
            yield from _gathers(site, strategy, stage, micro_batches, element_bytes)
        elif site.kind == "tied_embedding" and stage.tied:
            payload = tied_bytes(strategy.held_elements(site))
            yield Traffic("gradient_sync", "tied embedding", "send", 1, payload, ("pp",))
        elif site.kind == "experts":
            yield from (t.times(micro_batches) for t in experts_traffic(site, strategy, element_bytes))
        elif site.kind == "fp8_scales":
            for phase, elements in (("forward", site.dims["forward"]), ("backward", site.dims["backward"])):
                axes = strategy.place.stage_axes
                yield Traffic(phase, "largest magnitudes", "all_reduce", micro_batches, 4 * elements, axes)
        elif site.kind == "overflow_flag":
            if site.dims.get("experts"):
                yield Traffic("optimizer", "overflow over experts", "all_reduce", 1, 4, FOLDED_AXES)
            yield Traffic("optimizer", "overflow over stages", "all_reduce", 1, 4, ("pp",))


def _gathers(
    site: Site, strategy: Strategy, stage: Stage, micro_batches: int, element_bytes: int
) -> Iterator[Traffic]:
    """Yields the all-gathers of tensors from other stages, if each rank receives only a part of them."""
    whole = strategy.wire_elements(site) * strategy.wire_parts * element_bytes
    sources = [("forward", "stage before", stage.first), ("backward", "next stage", stage.last)]
    for phase, source, none in sources:
        if strategy.wire_parts > 1 and not none:
            purpose = f"from the {source}"
            yield Traffic(phase, purpose, "all_gather", micro_batches, whole, strategy.wire_axes)


class Chunks(nn.ModuleList):
    """A rank's stages in the order of the layers, each the module that a model builds. Parameters have their
    names in the whole model.

    Args:
        stages: the stage of each module.
    """

    def __init__(self, modules: Sequence[nn.Module], stages: Sequence[Stage]):
        super().__init__(modules)
        self.stages = stages

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self:
            yield from module.named_parameters(*args, **kwargs)

    @property
    def tied(self) -> Tensor | None:
        """The word embedding of the chunk that is the model's first or last stage; None without one."""
        for module, stage in zip(self, self.stages, strict=True):
            if stage.tied:
                weight: Tensor | None = module.tied  # type: ignore[assignment]
                return weight
        return None

    @property
    def unbatched(self) -> Any:
        """The names of inputs without a batch dim (:attr:`Model.unbatched`)."""
        return self[0].unbatched


def rank_module(build: Callable[[Stage], nn.Module], around: Composition) -> nn.Module:
    """The module of a rank: that of its stage, or :class:`Chunks` of several stages.

    Args:
        build: function that builds the module of a stage.
    """
    modules = [build(stage) for stage in around.stages]
    return modules[0] if len(modules) == 1 else Chunks(modules, around.stages)


def chunks_of(module: nn.Module) -> list[nn.Module]:
    """The modules of a rank's stages."""
    return list(module) if isinstance(module, Chunks) else [module]


def experts_traffic(site: Site, strategy: Strategy, element_bytes: int) -> Iterator[Traffic]:
    """Yields this rank's messages for blocks of experts in one micro-batch.

    Args:
        site: a site of the kind "experts".
        strategy: the outermost strategy of this rank.
        element_bytes: bytes of an element of hidden states.
    """
    call, d, place = site.experts, site.dims, strategy.place
    assert call is not None, "a site of experts says what it asks of a dispatcher"
    axes, replicas = strategy.position_axes, ("dp",) if call.aux_loss == "global" else ()
    entries = []
    if call.aux_loss != "none":
        tallied = (d["B"] if call.aux_loss == "sequence" else 1) * call.plan.experts * 8
        entries.append(
            Traffic("forward", "tokens of each expert", "all_reduce", 1, tallied, (*replicas, *axes))
        )
    if place.size("ep", "etp") > 1:
        tokens = d["B"] * d["L"] // place.size(*axes)
        dispatcher = all_dispatchers()[call.dispatcher]
        planned = dispatcher(replace(place, mesh=None), call.plan.experts, "plain", call.node_ranks)
        counts = planned_counts(call, strategy, d["B"], d["L"], planned.parts)
        sends = planned.traffic(call, d["H"], tokens, counts, element_bytes)
        varies = call.learned and dispatcher.by_counts and not call.padded
        entries += [replace(entry, varies=varies) for entry in sends]
    for entry in entries:
        yield entry.times(site.count)
        if site.recomputed and entry.phase == "forward" and entry.collective not in call.kept:
            again = replace(entry, phase="backward", purpose=f"{entry.purpose}, again")
            yield again.times(site.count)
