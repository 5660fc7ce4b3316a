"""The interface between models and strategies, whose defaults are the single device.

A model is written once and asks its strategy for the few things that parallelism changes. A strategy's file
overrides what it changes. The hooks are grouped by the question that they answer:

- :class:`Strategy`, here: which positions has this rank, and what goes between pipeline stages?
- :class:`LayerHooks`: what does a layer compute with its weights?
- :class:`AttentionHooks`: how do positions of a sequence meet?
- :class:`RecurrenceHooks`: how do positions meet in a gated recurrence?
- :class:`GridHooks`: how do positions meet on a grid?
- :class:`ParameterHooks`: over which ranks are parameters split, and their gradients summed?
- :class:`PlanningHooks`: can the strategy run these sizes, and which bytes does it send?

docs/add_strategy.md lists all hooks. Methods marked ``@final`` follow from the hooks.

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

    A strategy may own one axis of the mesh or several. ``size`` and ``rank`` count over all its axes, and
    ``group`` is the process group of all its axes; for one axis use ``place.size(axis)``,
    ``place.rank(axis)`` and ``place.group(axis)``.

    A strategy may stand around another one, ``within``, over other axes of the mesh. A hook that this
    strategy does not override is the hook of the strategy within or, if there is none, of the single device.
    An override acts for this strategy's ranks and then calls ``super()``: for example, tensor parallel linear
    attention selects the decay of its heads first. :mod:`spbench.impls.strategies.nesting` nests strategies.

    Args:
        place: this rank's coordinates in the mesh. Without a device mesh the strategy gives checks and closed
            forms, and on one rank it also runs.
        options: an instance of ``options_type``; None: the defaults.
        seed: the seed of dropout; see :class:`DropoutRandom`.
        within: the strategy that this one stands around, on the same place.
        axes: the mesh axes of the strategy; None: those of its class.

    Raises:
        TypeError: a class is defined whose ``meets`` has a key that MEETINGS lacks.
    """

    name: ClassVar[str] = "single"
    #: the mesh axes over which the strategy spreads one sample; none for the single device. An axis that is
    #: not in MESH_AXES is appended there
    axes: tuple[str, ...] = ()
    #: the frozen dataclass of the strategy's options
    options_type: ClassVar[type[Options]] = Options
    options: Options
    within: Strategy | None
    #: one line for `spbench list`
    summary: ClassVar[str] = "one device; the reference"
    #: the paper or program that describes the method
    source: ClassVar[str] = ""
    #: whether today's training programs offer the strategy, so that `spbench fit` proposes it; not inherited
    usual: ClassVar[bool] = False
    #: whether `spbench advise` tries the strategy; by default only if ``requires`` is empty; not inherited
    searched: ClassVar[bool] = True
    #: whether the strategy can be around one that spreads positions: its attention then calls ``super()``
    #: with some of the heads and all positions of its arguments
    can_enclose: ClassVar[bool] = False
    #: Python distributions, other than torch, whose code attention calls; only peers have some
    requires: ClassVar[tuple[str, ...]] = ()
    #: whether the class marks the work on blocks of lower ranks (:func:`work_of`), so that the last rank's
    #: step says what each rank does; a class that overrides how positions meet must set this itself
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
        #: losses that layers add to the model's loss
        self.losses: AuxiliaryLosses = AuxiliaryLosses(place.size("dp")) if within is None else within.losses
        #: memory that layers of this rank lend each other, as Megatron-LM's global memory buffer
        self.buffer: ReusedBuffer = ReusedBuffer() if within is None else within.buffer
        #: the stream on which layers compute while messages are under way
        self.side_stream: SideStream = SideStream() if within is None else within.side_stream
        #: the positions that each position attends to, for placements that depend on them (:meth:`pack`)
        self.packed: Attended = CAUSAL
        self._around: weakref.ref[Strategy] | None = None
        if within is not None:
            # weak, because in a cycle process groups would live until Python's next garbage collection
            within._around = weakref.ref(self)

    @property
    @final
    def outermost(self) -> Strategy:
        """The strategy around all others, which is the one that models hold."""
        around = None if self._around is None else self._around()
        return self if around is None else around.outermost

    @final
    def nested(self) -> Iterator[Strategy]:
        """Yields this strategy and all strategies within it, from the outside to the inside."""
        yield self
        if self.within is not None:
            yield from self.within.nested()

    @classmethod
    @final
    def configured(cls, place: Place, options: Mapping[str, Any] | None = None, seed: int = 0) -> Self:
        """The strategy of a rank, with the ``options`` that are named set and all others at their defaults.

        Raises:
            KeyError: there is no such option; the message lists the options.
            ValueError: an option has an impossible value.
        """
        return cls(place, set_options(cls.options_type(), options, f"strategy {cls.name}"), seed)

    @classmethod
    @final
    def planned(cls, size: int, rank: int = 0, options: Mapping[str, Any] | None = None) -> Self:
        """The strategy without process groups, for checks and closed forms: rank ``rank`` of ``size`` ranks,
        which all lie along the first of the strategy's axes.

        Raises:
            Unsupported: the strategy has no axis, and ``size`` is not 1.
        """
        return cls.configured(Place(cls.sizes_for(size), dict.fromkeys(cls.axes[:1], rank)), options)

    @classmethod
    @final
    def sizes_for(cls, size: int) -> dict[str, int]:
        """Sizes by axis of a mesh on which the strategy has ``size`` ranks along the first of its axes.

        Raises:
            Unsupported: the strategy has no axis, and ``size`` is not 1.
        """
        if not cls.axes and size > 1:
            raise Unsupported(f"{cls.name} runs on one rank, not {size}", "use 1")
        return dict.fromkeys(cls.axes[:1], size)

    # -- which positions this rank has ---------------------------------------------------------------

    @final
    def pack(self, attended: Attended) -> None:
        """Store the packed documents' lengths of a model that is being built, for all nested strategies whose
        placements depend on these lengths."""
        for strategy in self.outermost.nested():
            strategy._take_packed(attended)

    def _take_packed(self, attended: Attended) -> None:
        self.packed = attended

    @property_left_within
    def sequence_parts(self) -> int:
        """The number of parts that every sequence is split into."""
        return 1

    @property_left_within
    def sequence_part(self) -> int:
        """The number of this rank's part of every sequence, from 0 to :attr:`sequence_parts` - 1."""
        return 0

    @left_within
    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        """This rank's part of a whole input whose sequence dim is ``dim``."""
        return x

    @left_within
    def block_part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, between a block's projections, of a tensor x with all positions along ``dim``."""
        return x

    @left_within
    def first_token(self, x: Tensor) -> tuple[Tensor, float]:
        """x [B, L or a part, H] -> ([B, H], share): the first position that this rank holds, and this rank's
        share of the loss computed from it (0 where it is not the sequence's first)."""
        return x[:, 0], 1.0

    # -- between pipeline stages ---------------------------------------------------------------------

    @property_left_within
    def wire_axes(self) -> tuple[str, ...]:
        """The axes whose ranks all hold the same tensor between two pipeline stages, so that each rank sends
        only a part of the tensor."""
        return ()

    @property
    @final
    def wire_parts(self) -> int:
        """The number of parts in which the ranks send the tensor between two pipeline stages."""
        return self.place.size(*self.wire_axes)

    @left_within
    def to_wire(self, x: Tensor) -> Tensor:
        """The part of x [B, L or a part, H] that this rank sends to the same rank of a neighbouring stage."""
        return x.contiguous()

    @left_within
    def from_wire(self, received: Tensor, shape: Sequence[int]) -> Tensor:
        """x of the given ``shape``, from the tensor that a neighbouring stage's :meth:`to_wire` returned."""
        return received.view(shape)

    @final
    def wire_elements(self, site: Site) -> int:
        """The number of elements that one rank sends of a tensor [B, L, H] between two stages."""
        d = site.dims
        return d["B"] * d["L"] * d["H"] // (self.sequence_parts * self.wire_parts)
