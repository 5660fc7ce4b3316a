"""The interface between models and strategies, whose defaults are the single device.

A model is written once and asks its strategy for the few things that parallelism changes; a file of a
strategy overrides what it changes.

Shape letters: B batch, L sequence, H hidden, Z heads, A head size, N ranks in the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.axes import ALONE, Place, union
from spbench.impls.kernels.cross_entropy import cross_entropy_in_place, vocab_parallel_cross_entropy
from spbench.impls.kernels.projection import project
from spbench.impls.kernels.reused_buffer import ReusedBuffer
from spbench.impls.layout import (
    MEETINGS,
    SequenceDim,
    Shard,
    Site,
    Unsupported,
    mark_shard,
    shard_of,
)
from spbench.impls.options import Options, set_options
from spbench.impls.strategies.attention import AttentionHooks
from spbench.impls.strategies.delegation import left_within, property_left_within
from spbench.impls.strategies.dropout_masks import DropoutRandom
from spbench.impls.strategies.grouped_query import GroupedQueryLinear
from spbench.impls.strategies.linear import GroupedLinear, Linear
from spbench.impls.strategies.parameters import ParameterHooks
from spbench.impls.strategies.planning import PlanningHooks

__all__ = [
    "MEETINGS",
    "SequenceDim",
    "Shard",
    "Site",
    "Strategy",
    "Unsupported",
    "full_precision",
    "mark_shard",
    "shard_of",
    "union",
]


class Strategy(AttentionHooks, ParameterHooks, PlanningHooks):
    """The single device, and the interface that every way to parallelize implements.

    A strategy may own one axis of the mesh or several. ``size`` and ``rank`` count over all of them, and
    ``group`` is the process group of all of them; for one axis alone there are ``place.size(axis)``,
    ``place.rank(axis)`` and ``place.group(axis)``.

    A strategy may be around another one, ``within``, over other axes of the mesh. What it does not override
    is then what the one within does, and an override reaches that by ``super()``, as it reaches what a single
    device does where there is none within. So an override must say what to do with this strategy's ranks
    alone: a tensor parallel linear attention chooses the decay of its heads and hands over by ``super()``.
    :mod:`impls.strategies.nesting` builds strategies that are around each other.

    Args:
        place: of this rank. Without a device mesh the strategy can be asked for checks and closed forms, and
            on one rank it can also run.
        options: an instance of ``options_type``; None: the defaults.
        seed: the seed of dropout; see :class:`DropoutRandom`.
        within: the strategy that this one is around, on the same place.
        axes: instead of those of the class.
    """

    name: ClassVar[str] = "single"
    #: the mesh axes over which it spreads one sample; none for the single device
    axes: tuple[str, ...] = ()
    #: a frozen dataclass of what may be chosen about this strategy
    options_type: ClassVar[type[Options]] = Options
    options: Options
    #: one line for `spbench list`
    summary: ClassVar[str] = "one device; the reference"
    #: where the method is described
    source: ClassVar[str] = ""
    #: whether it can be around a strategy that spreads positions: attention is what ``super()`` does, of some
    #: heads but of all positions that it is asked for
    can_enclose: ClassVar[bool] = False
    #: the distributions whose code it calls where positions meet, beside torch's operators; of ours: none
    requires: ClassVar[tuple[str, ...]] = ()
    #: whether it changes during a step along which dim a grid is cut
    moves_grid: ClassVar[bool] = False

    def __init__(
        self,
        place: Place = ALONE,
        options: Options | None = None,
        seed: int = 0,
        *,
        within: Strategy | None = None,
        axes: tuple[str, ...] | None = None,
    ):
        self.place, self.within = place, within
        self.axes = type(self).axes if axes is None else axes
        self.options = self.options_type() if options is None else options
        self.size, self.rank = place.size(*self.axes), place.rank(*self.axes)
        self.group: dist.ProcessGroup | None = place.group(*self.axes)
        self.random = DropoutRandom(seed, place) if within is None else within.random
        #: memory that layers of this rank lend each other, as Megatron-LM's global memory buffer
        self.buffer: ReusedBuffer = ReusedBuffer() if within is None else within.buffer
        self._around: weakref.ref[Strategy] | None = None
        if within is not None:
            # no cycle, in which process groups would outlive what uses them until Python looks for garbage
            within._around = weakref.ref(self)

    @property
    def outermost(self) -> Strategy:
        """The strategy that is around all others, which models hold."""
        around = None if self._around is None else self._around()
        return self if around is None else around.outermost

    def nested(self) -> Iterator[Strategy]:
        """This strategy, the one within it, the one within that, and so on."""
        yield self
        if self.within is not None:
            yield from self.within.nested()

    @property
    def nested_axes(self) -> tuple[str, ...]:
        """The axes of this strategy and of all within it."""
        return tuple(axis for strategy in self.nested() for axis in strategy.axes)

    @classmethod
    def configured(cls, place: Place, options: Mapping[str, Any] | None = None, seed: int = 0) -> Self:
        """The strategy with some of its options given by name.

        Raises:
            KeyError: there is no such option; with those that there are.
            ValueError: an option has a value that cannot be.
        """
        return cls(place, set_options(cls.options_type(), options, f"strategy {cls.name}"), seed)

    @classmethod
    def planned(cls, size: int, rank: int = 0, options: Mapping[str, Any] | None = None) -> Self:
        """The strategy without process groups, for checks and closed forms: rank ``rank`` of ``size``, all of
        which lie along the first of its axes.

        Raises:
            Unsupported: it has no axis, and ``size`` is not 1.
        """
        return cls.configured(Place(cls.sizes_for(size), dict.fromkeys(cls.axes[:1], rank)), options)

    @classmethod
    def sizes_for(cls, size: int) -> dict[str, int]:
        """Sizes of a mesh on which the strategy has that many ranks, along the first of its axes.

        Raises:
            Unsupported: it has no axis, and ``size`` is not 1.
        """
        if not cls.axes and size > 1:
            raise Unsupported(f"{cls.name} runs on one rank, not {size}", "use 1")
        return dict.fromkeys(cls.axes[:1], size)

    # -- data ----------------------------------------------------------------------------------

    @left_within
    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        """This rank's part of a whole input whose sequence dim is ``dim``."""
        return x

    @left_within
    def block_part(self, x: Tensor, dim: int) -> Tensor:
        """Of a tensor with all positions along ``dim``, those that this rank has between the projections of a
        block."""
        return x

    # -- what a model leaves open ----------------------------------------------------------------

    @left_within
    def linear_in(self, in_features: int, out_features: int) -> Linear:
        """The projection that opens a block: [..., in_features] -> [..., out_features or a part of it]."""
        return Linear(in_features, out_features)

    @left_within
    def grouped_linear_in(self, in_features: int, out_features: int, groups: int) -> GroupedLinear:
        """Several projections of one input that open a block, without biases:
        [..., in_features] -> ``groups`` times [..., out_features or the same part of it]."""
        return GroupedLinear(in_features, out_features, groups)

    @left_within
    def grouped_query_linear_in(
        self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False
    ) -> GroupedQueryLinear:
        """The projection that opens grouped-query attention: [..., in_features] -> queries [..., G, Z/G, A],
        keys and values [..., G, A], of all ``heads`` and ``kv_heads`` or of a part of them; ``kv_heads``
        divides ``heads``."""
        return GroupedQueryLinear(in_features, head_size, heads, kv_heads, bias=bias)

    @left_within
    def shared_by_heads(self, weight: Tensor) -> Tensor:
        """A weight that all heads share and every rank holds, for use on the heads that this rank has between
        the projections of a block."""
        return weight

    @left_within
    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        """As :meth:`linear_in`, of an input that every rank has whole, also where sequences are cut."""
        return self.linear_in(in_features, out_features)

    @left_within
    def linear_out(self, in_features: int, out_features: int) -> Linear:
        """The projection that closes a block, without bias (the model adds it after the sum over ranks):
        [..., in_features or a part] -> [..., out_features]."""
        return Linear(in_features, out_features, bias=False)

    @left_within
    def embedding(self, vocabulary: int, hidden: int) -> nn.Module:
        """Word embedding: token ids [B, L] -> [B, L, hidden]; its ``weight`` is tied to the head."""
        return nn.Embedding(vocabulary, hidden)

    @left_within
    def vocabulary_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter with one row a vocabulary entry, laid out as :meth:`embedding` lays out its weight."""
        return nn.Parameter(torch.zeros(shape))

    @left_within
    def feature_parameter(self, initial: Tensor) -> nn.Parameter:
        """A parameter with a number for each feature between the projections of a block [H or a part of it],
        from the values [H] that it starts with."""
        return nn.Parameter(initial.to(torch.get_default_dtype()))

    @left_within
    def sequence_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter whose last dim is the sequence (one column a position)."""
        return nn.Parameter(torch.empty(shape))

    @property_left_within
    def vocabulary_parts(self) -> int:
        """The number of parts that the vocabulary is split into; padding makes it divisible."""
        return 1

    @left_within
    def vocabulary_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Scores [B, L, V or a part of it] of x [B, L, H] against a :meth:`vocabulary_parameter` [V, H]."""
        return project(x, weight, bias)

    @left_within
    def cross_entropy_in_place(self, logits: Tensor, labels: Tensor) -> Tensor:
        """As :meth:`cross_entropy`, in the memory of the logits, which nothing else may read; see
        :func:`impls.kernels.cross_entropy.cross_entropy_in_place`."""
        return cross_entropy_in_place(logits, labels, None)

    @left_within
    def cross_entropy(self, logits: Tensor, labels: Tensor, *, fused: bool) -> Tensor:
        """Per-token loss [B, L] in at least float32 from :meth:`vocabulary_logits` and labels [B, L].

        ``fused`` keeps one full-precision copy of the softmax and works in place, as Megatron-LM does.
        """
        if fused:
            return vocab_parallel_cross_entropy(logits, labels, None)
        return F.cross_entropy(
            full_precision(logits).flatten(0, 1), labels.flatten(), reduction="none"
        ).view_as(labels)

    @left_within
    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        """x [B, L or a part, H] -> ([B, H], share): position 0 of what this rank holds, and the share
        of the loss computed from it that this rank contributes (0 where it is not the sequence's)."""
        return x[:, 0], 1.0

    # -- between pipeline stages -------------------------------------------------------------------

    @property_left_within
    def wire_axes(self) -> tuple[str, ...]:
        """The axes over whose ranks a tensor between two pipeline stages, which all of them hold, is sent in
        parts, one by each."""
        return ()

    @property
    def wire_parts(self) -> int:
        """In how many parts."""
        return self.place.size(*self.wire_axes)

    @left_within
    def to_wire(self, x: Tensor) -> Tensor:
        """What this rank sends of x [B, L or a part, H] to the same rank of a neighbouring stage."""
        return x.contiguous()

    @left_within
    def from_wire(self, received: Tensor, shape: Sequence[int]) -> Tensor:
        """x of that shape, from what :meth:`to_wire` made of it on a neighbouring stage."""
        return received.view(shape)

    def wire_elements(self, site: Site) -> int:
        """Elements that one rank sends of a whole [B, L, H] between two stages."""
        d = site.dims
        return d["B"] * d["L"] * d["H"] // (self.sequence_parts * self.wire_parts)


def full_precision(x: Tensor) -> Tensor:
    """x in float32 where it is a half precision, else x itself."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
