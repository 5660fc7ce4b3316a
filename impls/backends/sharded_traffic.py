"""What fully sharded data parallelism sends in a step: gathered weights and summed gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch

from spbench.impls.backends.parameter_parts import padded_elements
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.backends.sharding_options import ShardingOptions, units_of
from spbench.impls.composition import chunks_of
from spbench.impls.traffic import Traffic


def sharded_traffic(
    step: PlannedStep, summed_as: torch.dtype, reshards: Callable[[bool, ShardingOptions], bool]
) -> Iterator[Traffic]:
    """What the backends ``zero2`` and ``zero3`` send in a step.

    Args:
        summed_as: the dtype of gradients while they are summed.
        reshards: as :meth:`FullySharded.reshards`.
    """
    options, count, width = step.options, step.micro_batches, summed_as.itemsize
    assert isinstance(options, ShardingOptions)
    staged = step.around.stage.count > 1
    kept = staged or options.reduce_at == "kept"
    stages = [*zip(chunks_of(step.build()), step.passes(), strict=True)]
    for summed in step.summed:
        if options.own_weights == "apart" and summed.size == 1:
            continue
        axes, each, sums = summed.group_axes, options.sharing(summed.size), 0
        #: elements by how often they are gathered
        forward, backward = Counter[int](), Counter[int]()
        for stage, passes in stages:
            units = units_of(stage, options)
            rest = {*stage.parameters()}.difference(*(unit.parameters() for unit in units))
            for p in stage.parameters():
                if step.strategy.partial_axes(p) != summed.axes:
                    continue
                elements = padded_elements(p.shape, each)
                sums += elements * p.requires_grad
                frees = reshards(p in rest, options)
                first, again = _gathers(passes, frees) if kept else (count, count * frees)
                forward[first] += elements
                backward[again] += elements
        for phase, words, gathered in (
            ("forward", "weights", forward),
            ("backward", "weights again", backward),
        ):
            for often, elements in gathered.items():
                nbytes = elements * step.element_bytes
                yield Traffic(phase, words, "all_gather", often, nbytes, axes, each)
        often = 1 if staged or options.reduce_at != "each" else count
        yield Traffic("backward", "gradients", "reduce_scatter", often, sums * width, axes, each)
        if (groups := summed.size // each) > 1:
            part = sums * width // each
            yield Traffic("backward", "over groups", "all_reduce", often, part, axes, groups)
        if step.precision.loss_scale:
            yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, axes, each)


def _gathers(passes: Iterable[bool], reshards: bool) -> tuple[int, int]:
    """How often a stage's weights are gathered in a step: for forwards, and for backwards.

    Args:
        passes: of the stage in their order: True for a forward, False for a backward.
        reshards: whether the weights are freed after each forward.
    """
    whole, counts = False, [0, 0]
    for forward in passes:
        counts[not forward] += not whole
        whole = not (forward and reshards)
    return counts[0], counts[1]
