"""The gradient buffers of Megatron-Core: which parameters each has, and in which buckets they lie.

It also plans weights that are kept in eight bits.

Megatron-LM's ``--fp8-param-gather`` keeps weights whose matmuls are in eight bits only as E4M3, one byte an
element with one scale a weight, in a buffer apart from other weights. After an update each rank casts its
part of the main weights. The largest magnitude of a weight may lie on any of the ranks that share the weight,
so one all-reduce of the magnitudes of all weights comes first (cast_master_weights_to_fp8 of
transformer_engine/pytorch/tensor/utils.py, 2.x); with delayed scaling it comes last, for the next scales. The
cast parts are then gathered, instead of sixteen bits.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.buffer_layout import BucketLayout, laid_out
from spbench.impls.backends.flat import covered
from spbench.impls.backends.megatron_options import MegatronOptions
from spbench.impls.backends.muon import Dealt, dealt, is_matrix, packed
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import Composition, by_partial_axes, chunks_of, summed_axes
from spbench.impls.kernels.fp8_casts import E4M3, WHOLE, fp8_amax, fp8_cast
from spbench.impls.layout import shard_of
from spbench.impls.place import Place
from spbench.impls.strategies.base import Strategy
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class PlannedBuffer:
    """The plan of one gradient buffer of a rank.

    Attributes:
        chunk: the number of the run of layers whose parameters the buffer has.
        axes: the strategy's axes over which the gradients are summed.
        parameters: the buffer's parameters by name.
        sharded: whether each rank has a part of every bucket.
        eight_bits: whether the weights are kept in eight bits.
    """

    chunk: int
    axes: tuple[str, ...]
    parameters: Mapping[str, nn.Parameter]
    layouts: Sequence[BucketLayout]
    sharded: bool
    eight_bits: bool = False

    @property
    def elements(self) -> list[int]:
        """The number of elements of each parameter."""
        return [p.numel() for p in self.parameters.values()]


def planned_buffers(
    module: nn.Module, strategy: Strategy, around: Composition, options: MegatronOptions
) -> Iterator[PlannedBuffer]:
    """Yields the buffers of a rank's module, which may be on the meta device."""
    tied = around.tied(module)
    for number, chunk in enumerate(chunks_of(module)):
        names = {p: name for name, p in chunk.named_parameters() if p.requires_grad}
        full_at = options.full_at(around, number)
        for axes, all_of_axes in by_partial_axes(names, strategy).items():
            sharding = options.sharding(around.place.size(*summed_axes(axes)))
            for apart, parameters in _sorted(all_of_axes, names, options):
                if apart and options.packs:
                    assert sharding is not None
                    layouts = packed([p.shape for p in parameters], full_at, sharding)
                else:
                    alone = [p is tied for p in parameters]
                    layouts = laid_out([p.numel() for p in parameters], alone, full_at, sharding)
                by_name = {names[p]: p for p in parameters}
                eight_bits = apart and options.fp8_param_gather
                yield PlannedBuffer(number, axes, by_name, layouts, sharding is not None, eight_bits)


def _sorted(
    parameters: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str], options: MegatronOptions
) -> Iterator[tuple[bool, list[nn.Parameter]]]:
    """Yields (True, parameters with a buffer of their own: packed matrices or weights in eight bits) and
    (False, other parameters), each if there are some."""

    def stands_apart(p: nn.Parameter) -> bool:
        return is_matrix(names[p], p) if options.packs else options.fp8_param_gather and in_eight_bits(p)

    for apart in (True, False):
        if chosen := [p for p in parameters if stands_apart(p) == apart]:
            yield apart, chosen


def muon_traffic(step: PlannedStep, options: MegatronOptions) -> Iterator[Traffic]:
    """Yields Muon's messages in addition to those of gradients and of sharded buffers' weights."""
    place, element_bytes = step.around.place, step.element_bytes
    whole, parts = Counter[str](), Counter[tuple[str, ...]]()
    for buffer in planned_buffers(step.build(), step.strategy, step.around, options):
        ranks, rank = place.size(*summed_axes(buffer.axes)), place.rank(*summed_axes(buffer.axes))
        own = _own(buffer, options, ranks, rank)
        for (name, p), mine in zip(buffer.parameters.items(), own, strict=True):
            shard = shard_of(p)
            gathered = mine and is_matrix(name, p) and options.muon_tp_mode == "duplicated"
            if gathered and shard and shard.parts > 1:
                whole[shard.axis] += p.numel() * shard.parts
        if options.deals:
            parts[buffer.axes] += sum(buffer.elements)
    width = 4 if step.precision.master else element_bytes
    for axis, elements in whole.items():
        yield Traffic("optimizer", "moments of matrices", "all_gather", 1, elements * width, (axis,))
    for axes, elements in parts.items():
        yield Traffic(
            "optimizer", "updated weights", "broadcast", 1, elements * element_bytes, summed_axes(axes)
        )


def updated_elements(step: PlannedStep, places: Sequence[Place]) -> list[int]:
    """The number of elements that the rank at each of these places updates."""
    options, held, buffers = step.options, [], [*_planned(step)]
    assert isinstance(options, MegatronOptions)
    for place in places:
        total = 0
        for buffer in buffers:
            axes = summed_axes(buffer.axes)
            own = _own(buffer, options, place.size(*axes), place.rank(*axes))
            total += sum(n for n, mine in zip(buffer.elements, own, strict=True) if mine)
        held.append(total)
    return held


def _own(buffer: PlannedBuffer, options: MegatronOptions, ranks: int, rank: int) -> list[bool]:
    """For each parameter of a buffer, whether this rank updates it or a part of it."""
    if options.deals:
        return [owner == rank for owner in dealt(buffer.elements, ranks)]
    own = [True] * len(buffer.parameters)
    for layout in buffer.layouts if buffer.sharded else ():
        start, end = layout.shard(rank, ranks)
        for number, first in zip(layout.members, layout.starts, strict=True):
            own[number] = first < end and first + buffer.elements[number] > start
    return own


def cuts_of_buffers(step: PlannedStep) -> Hashable:
    """See :meth:`Backend.cuts`."""
    options, cuts = step.options, set[Hashable]()
    assert isinstance(options, MegatronOptions)
    for buffer in _planned(step):
        place, full_at = step.around.place, options.full_at(step.around, buffer.chunk)
        summed, all_sizes = summed_axes(buffer.axes), buffer.elements
        each = options.sharing(place.size(*summed)) if options.distributed_optimizer else 1
        # the host's share counts all layers, and so does the packing of whole weights
        whole = sum(all_sizes) if options.optimizer_offload_fraction < 1 or options.packs else None
        if options.deals:
            owners = dealt(all_sizes, place.size(*summed))
            cuts.add((buffer.axes, tuple(owners), place.rank(*summed)))
        for layout in buffer.layouts:
            sizes = [all_sizes[i] for i in layout.members]
            ends = [start + size for start, size in zip(layout.starts, sizes, strict=True)]
            part = covered(layout.starts, ends, *layout.shard(place.rank(*summed) % each, each))
            padding = layout.end - layout.start - sum(sizes)
            # a single bucket covers all layers; otherwise each bucket covers some layers
            within = None if full_at is None else tuple(sizes)
            kind = buffer.chunk, buffer.axes, buffer.eight_bits
            cuts.add((*kind, padding, within, whole, part if each > 1 else None))
    return frozenset(cuts)


def _planned(step: PlannedStep) -> Iterator[PlannedBuffer]:
    """Yields the buffers of a planned step."""
    assert isinstance(step.options, MegatronOptions)
    return planned_buffers(step.build(), step.strategy, step.around, step.options)


def sharded_lengths(step: PlannedStep, *, eight_bits: bool = False) -> Counter[tuple[str, ...]]:
    """The number of elements of the padded buffers, or only of those with weights in ``eight_bits``, by the
    strategy's axes over which the buffers are summed."""
    padded: Counter[tuple[str, ...]] = Counter()
    for buffer in _planned(step):
        if buffer.eight_bits or not eight_bits:
            padded[buffer.axes] += buffer.layouts[-1].end
    return padded


def magnitudes_traffic(step: PlannedStep) -> Iterator[Traffic]:
    """Yields the all-reduces of largest magnitudes of weights that are cast to eight bits after an update."""
    assert isinstance(step.options, MegatronOptions)
    for buffer in (each for each in _planned(step) if each.eight_bits):
        axes, (some, *_) = summed_axes(buffer.axes), buffer.parameters.values()
        width = 4 if some.spbench_fp8.delayed else max(4, step.element_bytes)  # type: ignore[attr-defined]
        each = step.options.sharing(step.around.place.size(*axes))
        nbytes = len(buffer.parameters) * width
        yield Traffic("optimizer", "largest of weights", "all_reduce", 1, nbytes, axes, each)


def dealt_weights(
    planned: Sequence[PlannedBuffer],
    groups: Mapping[tuple[str, ...], tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]],
) -> list[Dealt]:
    """For each group of several ranks, its weights with the rank that updates each."""
    of_axes: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for buffer in planned:
        of_axes.setdefault(buffer.axes, []).extend(buffer.parameters.values())
    return [Dealt(weights, group) for axes, weights in of_axes.items() if (group := groups[axes][0])]


def in_eight_bits(p: Tensor) -> bool:
    """Whether a weight can be kept in eight bits: its recipe has one scale for the whole weight."""
    recipe = getattr(p, "spbench_fp8", None)
    return recipe is not None and bool(recipe.whole)


def keep_in_eight_bits(p: nn.Parameter, into: Tensor) -> None:
    """Cast a weight into ``into``, bytes of its shape, which hold its values from now on. Gradients stay in
    the weight's precision, and the values before the cast are kept for :func:`main_weight`."""
    before, data = p.detach(), into.view(E4M3)
    p.spbench_before_cast = before  # type: ignore[attr-defined]
    whole = before.flatten(0, -2)
    cast, scale = fp8_cast(whole, fp8_amax(whole), E4M3, WHOLE, None, False)
    data.copy_(cast.view_as(data))
    p.spbench_fp8_scale = scale  # type: ignore[attr-defined]
    p.data, p.grad_dtype = data, before.dtype
