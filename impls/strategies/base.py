"""The interface between models and strategies, whose defaults are the single device.

A model is written once and asks its strategy for the few things that parallelism changes; a file of a
strategy overrides what it changes.

Shape letters: B batch, L sequence, H hidden, Z heads, A head size, N ranks in the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.axes import ALONE, Place
from spbench.impls.kernels.cross_entropy import vocab_parallel_cross_entropy
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
from spbench.impls.strategies.dropout_masks import DropoutRandom
from spbench.impls.strategies.grid import GridHooks, as_sequences
from spbench.impls.strategies.linear import GroupedLinear, Linear
from spbench.impls.traffic import Traffic

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
]


class Strategy(AttentionHooks, GridHooks):
    """The single device, and the interface that every way to parallelize implements.

    A strategy may own one axis of the mesh or several. ``size`` and ``rank`` count over all of them, and
    ``group`` is the process group of all of them; for one axis alone there are ``place.size(axis)``,
    ``place.rank(axis)`` and ``place.group(axis)``.

    Args:
        place: of this rank. Without a device mesh the strategy can be asked for checks and closed forms, and
            on one rank it can also run.
        options: an instance of ``options_type``; None: the defaults.
        seed: the seed of dropout; see :class:`DropoutRandom`.
    """

    name: ClassVar[str] = "single"
    #: the mesh axes over which one sample is spread, the outermost first; none for the single device
    axes: ClassVar[tuple[str, ...]] = ()
    #: a frozen dataclass of what may be chosen about this strategy
    options_type: ClassVar[type[Options]] = Options
    options: Options
    #: one line for `spbench list`
    summary: ClassVar[str] = "one device; the reference"
    #: where the method is described
    source: ClassVar[str] = ""
    #: the keys of MEETINGS that it can run on more than one rank
    meets: ClassVar[frozenset[str]] = frozenset(MEETINGS)
    #: whether between the projections of a block a rank has some of the heads and features only
    splits_features: ClassVar[bool] = False

    def __init__(self, place: Place = ALONE, options: Options | None = None, seed: int = 0):
        self.place = place
        self.options = self.options_type() if options is None else options
        self.size, self.rank = place.size(*self.axes), place.rank(*self.axes)
        self.group: dist.ProcessGroup | None = place.group(*self.axes)
        self.random = DropoutRandom(seed, place)

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

    # -- can it run, and what does it send ---------------------------------------------------

    def check(self, sites: Iterable[Site]) -> None:
        """Raise :class:`Unsupported` if the model's sites cannot be spread over this many ranks."""
        sites = list(sites)
        if self.size == 1:
            return
        for site in sites:
            if site.kind in MEETINGS and site.kind not in self.meets:
                raise Unsupported(
                    f"{self.name} has no {MEETINGS[site.kind]}", "use another strategy or another model"
                )
            if site.kind == "feature_norm" and self.splits_features:
                raise Unsupported(
                    f"{self.name} splits the features, over all of which this model normalises",
                    "set the model's option attention_norm to head",
                )
        self.check_sizes(list(as_sequences(sites, self.grid_dim)))

    def check_sizes(self, sites: Sequence[Site]) -> None:
        """The part of :meth:`check` that is about sizes, called where there is more than one rank."""

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        """The coordinates 0 to ``size`` - 1 along one of its axes, in sets whose ranks run the same program.
        The first set is the one that sends the most, and the first of a set stands for it in traces."""
        return [list(range(size))]

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        """Closed form of what this rank sends over its strategy's groups for one micro-batch, and in the
        phases gradient_sync and optimizer for one step.

        Args:
            sites: what the model and the step ask for.
            element_bytes: bytes of an element of activations and gradients.
        """
        yield from ()

    # -- data ----------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        """This rank's part of a whole input whose sequence dim is ``dim``."""
        return x

    def block_positions(self, positions: Tensor) -> Tensor:
        """The positions that this rank has between the projections of a block, of all positions [L]."""
        return self.shard(positions, 0)

    # -- what a model leaves open ----------------------------------------------------------------

    def linear_in(self, in_features: int, out_features: int) -> Linear:
        """The projection that opens a block: [..., in_features] -> [..., out_features or a part of it]."""
        return Linear(in_features, out_features)

    def grouped_linear_in(self, in_features: int, out_features: int, groups: int) -> GroupedLinear:
        """Several projections of one input that open a block, without biases:
        [..., in_features] -> ``groups`` times [..., out_features or the same part of it]."""
        return GroupedLinear(in_features, out_features, groups)

    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        """As :meth:`linear_in`, of an input that every rank has whole, also where sequences are cut."""
        return self.linear_in(in_features, out_features)

    def linear_out(self, in_features: int, out_features: int) -> Linear:
        """The projection that closes a block, without bias (the model adds it after the sum over ranks):
        [..., in_features or a part] -> [..., out_features]."""
        return Linear(in_features, out_features, bias=False)

    def embedding(self, vocabulary: int, hidden: int) -> nn.Module:
        """Word embedding: token ids [B, L] -> [B, L, hidden]; its ``weight`` is tied to the head."""
        return nn.Embedding(vocabulary, hidden)

    def vocabulary_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter with one row a vocabulary entry, laid out as :meth:`embedding` lays out its weight."""
        return nn.Parameter(torch.zeros(shape))

    def feature_parameter(self, initial: Tensor) -> nn.Parameter:
        """A parameter with a number for each feature between the projections of a block [H or a part of it],
        from the values [H] that it starts with."""
        return nn.Parameter(initial.to(torch.get_default_dtype()))

    def sequence_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter whose last dim is the sequence (one column a position)."""
        return nn.Parameter(torch.empty(shape))

    @property
    def vocabulary_parts(self) -> int:
        """The number of parts that the vocabulary is split into; padding makes it divisible."""
        return 1

    def vocabulary_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Scores [B, L, V or a part of it] of x [B, L, H] against a :meth:`vocabulary_parameter` [V, H]."""
        return F.linear(x, weight, bias)

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, fused: bool) -> Tensor:
        """Per-token loss [B, L] in at least float32 from :meth:`vocabulary_logits` and labels [B, L].

        ``fused`` keeps one full-precision copy of the softmax and works in place, as Megatron-LM does.
        """
        if fused:
            return vocab_parallel_cross_entropy(logits, labels, None)
        return F.cross_entropy(
            full_precision(logits).flatten(0, 1), labels.flatten(), reduction="none"
        ).view_as(labels)

    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        """x [B, L or a part, H] -> ([B, H], share): position 0 of what this rank holds, and the share
        of the loss computed from it that this rank contributes (0 where it is not the sequence's)."""
        return x[:, 0], 1.0

    @property
    def sequence_parts(self) -> int:
        """The number of parts that every sequence is split into."""
        return 1

    @property
    def hidden_axes(self) -> tuple[str, ...]:
        """As :attr:`attention_axes`, of hidden states between blocks."""
        return ()

    # -- between pipeline stages -------------------------------------------------------------------

    @property
    def wire_parts(self) -> int:
        """How many parts a tensor between two pipeline stages is sent in, by as many ranks."""
        return 1

    def to_wire(self, x: Tensor) -> Tensor:
        """What this rank sends of x [B, L or a part, H] to the same rank of a neighbouring stage."""
        return x.contiguous()

    def from_wire(self, received: Tensor, shape: Sequence[int]) -> Tensor:
        """x of that shape, from what :meth:`to_wire` made of it on a neighbouring stage."""
        return received.view(shape)

    def wire_elements(self, site: Site) -> int:
        """Elements that one rank sends of a whole [B, L, H] between two stages."""
        d = site.dims
        return d["B"] * d["L"] * d["H"] // (self.sequence_parts * self.wire_parts)

    def held_elements(self, site: Site) -> int:
        """Elements that one rank holds of the parameters of a site: all ``elements``, and of those that
        have a column a position (``sequence``) its own."""
        return site.dims["elements"] + site.dims.get("sequence", 0) // self.sequence_parts

    def partial_elements(self, site: Site) -> Mapping[tuple[str, ...], int]:
        """Of :meth:`held_elements`, those with :meth:`partial_axes`, by these axes."""
        return {}

    # -- gradients ---------------------------------------------------------------------------------

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The axes over whose ranks this parameter's gradient must be summed, since backward gives each of
        them a part of the sum."""
        return ()

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over whose ranks the loss must be summed, since each of them computes a share of it."""
        return ()


def full_precision(x: Tensor) -> Tensor:
    """x in float32 where it is a half precision, else x itself."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
