"""Closed forms of the backend ``megatron``: what its ranks send, and how its buffers are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from spbench.impls.backends.flat import covered
from spbench.impls.backends.gradient_norm import norm_traffic
from spbench.impls.backends.layer_wise import dealt
from spbench.impls.backends.megatron_options import MegatronOptions
from spbench.impls.backends.planned_buffers import PlannedBuffer, muon_traffic, planned_buffers
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import summed_axes
from spbench.impls.layout import Unsupported
from spbench.impls.traffic import Traffic


def cuts(step: PlannedStep) -> Hashable:
    """See :meth:`Backend.cuts`."""
    options, found = step.options, set[Hashable]()
    assert isinstance(options, MegatronOptions)
    for buffer in buffers_of(step):
        place, full_at = step.around.place, options.full_at(step.around, buffer.chunk)
        summed, all_sizes = summed_axes(buffer.axes), buffer.elements
        each = options.sharing(place.size(*summed)) if options.distributed_optimizer else 1
        # a part of all layers may be on the host, and whole weights are shared out among all layers
        whole = sum(all_sizes) if options.optimizer_offload_fraction < 1 or options.packs else None
        if options.deals:
            owners = dealt(all_sizes, place.size(*summed))
            found.add((buffer.axes, tuple(owners), place.rank(*summed)))
        for layout in buffer.layouts:
            sizes = [all_sizes[i] for i in layout.members]
            ends = [start + size for start, size in zip(layout.starts, sizes, strict=True)]
            part = covered(layout.starts, ends, *layout.shard(place.rank(*summed) % each, each))
            padding = layout.end - layout.start - sum(sizes)
            # the only bucket is of all layers, and others of some
            within = None if full_at is None else tuple(sizes)
            found.add((buffer.chunk, buffer.axes, padding, within, whole, part if each > 1 else None))
    return frozenset(found)


def traffic(step: PlannedStep, width: int) -> Iterator[Traffic]:
    """See :meth:`Backend.traffic`.

    Args:
        width: bytes of an element of the gradients that are summed.
    """
    options = step.options
    assert isinstance(options, MegatronOptions)
    if options.update == "muon" and step.precision.loss_scale:
        raise Unsupported("Muon has no loss scaling", "use bf16")
    if options.optimizer_offload_fraction < 1 and step.precision.loss_scale:
        raise Unsupported("a part of the optimizer on the host has no loss scaling", "use bf16")
    if options.clip_grad:
        yield from norm_traffic(step.around.place, step.element_bytes)
    phase = "backward" if options.overlap_grad_reduce else "gradient_sync"
    shards = options.distributed_optimizer and not options.deals
    lengths = _sharded_lengths(step) if shards else Counter()
    if options.update == "muon":
        yield from muon_traffic(step, options)
    for summed in step.summed:
        axes = summed.group_axes
        if not shards:
            yield Traffic(phase, "main gradients", "all_reduce", 1, summed.elements * width, axes)
            continue
        elements, each = lengths[summed.axes], options.sharing(summed.size)
        summed_bytes, gathered_bytes = elements * width, elements * step.element_bytes
        yield Traffic(phase, "main gradients", "reduce_scatter", 1, summed_bytes, axes, each)
        if each < summed.size:
            part, instances = summed_bytes // each, summed.size // each
            yield Traffic("gradient_sync", "over instances", "all_reduce", 1, part, axes, instances)
        gathered = "forward" if options.overlap_param_gather else "optimizer"
        yield Traffic(gathered, "updated weights", "all_gather", 1, gathered_bytes, axes, each)
        if step.precision.loss_scale:
            yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, axes, each)


def buffers_of(step: PlannedStep) -> Iterator[PlannedBuffer]:
    """The buffers of a step that is planned."""
    assert isinstance(step.options, MegatronOptions)
    return planned_buffers(step.build(), step.strategy, step.around, step.options)


def _sharded_lengths(step: PlannedStep) -> Counter[tuple[str, ...]]:
    """Elements of the padded buffers, by the axes of the strategy over which they are summed."""
    padded: Counter[tuple[str, ...]] = Counter()
    for buffer in buffers_of(step):
        padded[buffer.axes] += buffer.layouts[-1].end
    return padded
