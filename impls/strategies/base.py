"""The interface between models and strategies, whose defaults are the single device.

A model is written once and asks its strategy for the few things that parallelism changes. A strategy's file
overrides what it changes. The hooks are grouped by the question that they answer:

- :class:`Strategy`, here: which positions has this rank, and what goes between pipeline stages?
- :class:`LayerHooks`: what does a layer compute with its weights?
- :class:`AttentionHooks`: how do positions of a sequence meet?
- :class:`RecurrenceHooks`: how do they meet in a gated recurrence?
- :class:`GridHooks`: how do they meet on a grid?
- :class:`ParameterHooks`: over which ranks are parameters split, and their gradients summed?
- :class:`PlanningHooks`: can it run these sizes, and what does it send?

docs/add_strategy.md lists all of them. What is marked ``@final`` follows from the hooks.

Shape letters: B batch, L sequence, H hidden, N ranks in the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, final

import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.axes import MESH_AXES, union
from spbench.impls.collectives import ReusedBuffer
from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.kernels.side_stream import SideStream
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
from spbench.impls.place import ALONE, Place
from spbench.impls.strategies.attention import AttentionHooks
from spbench.impls.strategies.auxiliary_losses import AuxiliaryLosses
from spbench.impls.strategies.delegation import left_within, property_left_within
from spbench.impls.strategies.layers import LayerHooks
from spbench.impls.strategies.planning import ParameterHooks, PlanningHooks
from spbench.impls.strategies.recurrence import RecurrenceHooks

__all__ = [
    "MEETINGS",
    "SequenceDim",
    "Shard",
    "Site",
    "Strategy",
    "Unsupported",
    "mark_shard",
    "shard_of",
    "union",
]


class Strategy(LayerHooks, AttentionHooks, RecurrenceHooks, ParameterHooks, PlanningHooks):
    """The single device, and the interface that every strategy implements.

    A strategy may own one axis of the mesh or several. ``size`` and ``rank`` count over all of them, and
    ``group`` is their process group; for one axis alone use ``place.size(axis)``, ``place.rank(axis)`` and
    ``place.group(axis)``.

    A strategy may stand around another one, ``within``, over other axes of the mesh. The one within, or the
    single device if there is none, does what this one does not override. An override acts for this strategy's
    ranks alone and reaches the rest by ``super()``: a tensor parallel linear attention chooses the decay of
    its heads and hands over. :mod:`spbench.impls.strategies.nesting` builds strategies around each other.

    Args:
        place: of this rank. Without a device mesh the strategy gives checks and closed forms, and on one rank
            it also runs.
        options: an instance of ``options_type``; None: the defaults.
        seed: the seed of dropout; see :class:`DropoutRandom`.
        within: the strategy that this one stands around, on the same place.
        axes: in place of the class's axes.

    Raises:
        TypeError: a class is defined whose ``meets`` has a key that MEETINGS lacks.
    """

    name: ClassVar[str] = "single"
    #: the mesh axes over which it spreads one sample; none for the single device. An axis that no mesh has
    #: yet is added to those that cells may have, behind the others
    axes: tuple[str, ...] = ()
    #: a frozen dataclass of what may be chosen about this strategy
    options_type: ClassVar[type[Options]] = Options
    options: Options
    within: Strategy | None
    #: one line for `spbench list`
    summary: ClassVar[str] = "one device; the reference"
    #: where the method is described
    source: ClassVar[str] = ""
    #: whether training programs of the day offer it, so that `spbench fit` proposes it; not inherited
    usual: ClassVar[bool] = False
    #: whether `spbench advise` tries it: by default one without ``requires``; not inherited
    searched: ClassVar[bool] = True
    #: whether it can be around a strategy that spreads positions: its attention calls ``super()`` with some
    #: of the heads and every position that it was given
    can_enclose: ClassVar[bool] = False
    #: distributions beside torch whose code it calls where positions meet; peers have some
    requires: ClassVar[tuple[str, ...]] = ()
    #: whether it marks what it computes for blocks of lower ranks (:func:`work_of`), so that the last rank's
    #: step says what each rank does; of a class that overrides how positions meet, only if it says so itself
    marks_work: ClassVar[bool] = False
    #: whether the dim along which a grid is cut changes during a step
    moves_grid: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.usual = bool(vars(cls).get("usual", False))
        cls.searched = bool(vars(cls).get("searched", not cls.requires))
        MESH_AXES.add(vars(cls).get("axes", ()))
        if unknown := sorted(set(cls.meets) - set(MEETINGS)):
            choices = ", ".join(MEETINGS)
            raise TypeError(
                f"{cls.__name__}.meets has {unknown[0]!r}, where positions cannot meet; choices: {choices}"
            )

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
        #: of layers, beside the model's
        self.losses: AuxiliaryLosses = AuxiliaryLosses(place.size("dp")) if within is None else within.losses
        #: memory that layers of this rank lend each other, as Megatron-LM's global memory buffer
        self.buffer: ReusedBuffer = ReusedBuffer() if within is None else within.buffer
        #: of what layers compute beside what they send
        self.side_stream: SideStream = SideStream() if within is None else within.side_stream
        #: what positions of a sequence attend to, where placements must know it; see :meth:`pack`
        self.packed: Attended = CAUSAL
        self._around: weakref.ref[Strategy] | None = None
        if within is not None:
            # a weak reference: in a cycle process groups would live until Python's next garbage collection
            within._around = weakref.ref(self)

    @property
    @final
    def outermost(self) -> Strategy:
        """The strategy around all others; models hold this one."""
        around = None if self._around is None else self._around()
        return self if around is None else around.outermost

    @final
    def nested(self) -> Iterator[Strategy]:
        """This strategy, the one within it, the one within that, and so on."""
        yield self
        if self.within is not None:
            yield from self.within.nested()

    @classmethod
    @final
    def configured(cls, place: Place, options: Mapping[str, Any] | None = None, seed: int = 0) -> Self:
        """The strategy with some of its options given by name.

        Raises:
            KeyError: there is no such option; the message lists the options.
            ValueError: an option has an impossible value.
        """
        return cls(place, set_options(cls.options_type(), options, f"strategy {cls.name}"), seed)

    @classmethod
    @final
    def planned(cls, size: int, rank: int = 0, options: Mapping[str, Any] | None = None) -> Self:
        """The strategy without process groups, for checks and closed forms: rank ``rank`` of ``size``, all of
        which lie along the first of its axes.

        Raises:
            Unsupported: it has no axis, and ``size`` is not 1.
        """
        return cls.configured(Place(cls.sizes_for(size), dict.fromkeys(cls.axes[:1], rank)), options)

    @classmethod
    @final
    def sizes_for(cls, size: int) -> dict[str, int]:
        """Sizes of a mesh on which the strategy has that many ranks, along the first of its axes.

        Raises:
            Unsupported: it has no axis, and ``size`` is not 1.
        """
        if not cls.axes and size > 1:
            raise Unsupported(f"{cls.name} runs on one rank, not {size}", "use 1")
        return dict.fromkeys(cls.axes[:1], size)

    # -- which positions this rank has ---------------------------------------------------------------

    @final
    def pack(self, attended: Attended) -> None:
        """Take the lengths of the packed documents from a model that is being built, for placements that
        depend on them."""
        for strategy in self.outermost.nested():
            strategy.packed = attended

    @property_left_within
    def sequence_parts(self) -> int:
        """The number of parts that every sequence is split into."""
        return 1

    @property_left_within
    def sequence_part(self) -> int:
        """Which of :attr:`sequence_parts` this rank has, from 0."""
        return 0

    @left_within
    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        """This rank's part of a whole input whose sequence dim is ``dim``."""
        return x

    @left_within
    def block_part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, between the projections of a block, of x with all positions along ``dim``."""
        return x

    @left_within
    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        """x [B, L or a part, H] -> ([B, H], share): the first position that this rank holds, and this rank's
        share of the loss computed from it (0 where it is not the sequence's first)."""
        return x[:, 0], 1.0

    # -- between pipeline stages ---------------------------------------------------------------------

    @property_left_within
    def wire_axes(self) -> tuple[str, ...]:
        """The axes whose ranks all hold the tensor that goes from one pipeline stage to the next, so that
        each rank sends a part of it."""
        return ()

    @property
    @final
    def wire_parts(self) -> int:
        """The number of these parts."""
        return self.place.size(*self.wire_axes)

    @left_within
    def to_wire(self, x: Tensor) -> Tensor:
        """What this rank sends of x [B, L or a part, H] to the same rank of a neighbouring stage."""
        return x.contiguous()

    @left_within
    def from_wire(self, received: Tensor, shape: Sequence[int]) -> Tensor:
        """x of that shape, from the result of :meth:`to_wire` on a neighbouring stage."""
        return received.view(shape)

    @final
    def wire_elements(self, site: Site) -> int:
        """Elements that one rank sends of a whole [B, L, H] between two stages."""
        d = site.dims
        return d["B"] * d["L"] * d["H"] // (self.sequence_parts * self.wire_parts)
