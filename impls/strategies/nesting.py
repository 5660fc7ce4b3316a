"""Strategies around each other: tensor parallelism around a sequence parallel one, Ulysses around a ring.

A name with plus signs, such as "tensor_parallel+ring_attention", lists strategies that stand around one
another, the outermost first. Each strategy has mesh axes of its own and depends on no other: it acts on the
heads and features that the strategy around it leaves to a rank, and calls the strategy within by ``super()``
(:class:`Strategy`). So pairs need no code:

- "tensor_parallel+S" and "megatron_sp+S" split weights, heads and vocabulary over tp around any S over sp
  ("4D parallelism", arXiv 2105.13120, section 5; Megatron-LM's TP + SP + CP);
- "ulysses+S" swaps chunks of the sequence for heads over sp, and S divides the sequence over cp:
  "ulysses+ring_attention" is USP (arXiv 2405.07719) and Megatron-LM's hierarchical a2a+p2p;
- "tensor_parallel+ulysses+ring_attention" does all of this.

If two strategies use the same axis, the outer one keeps it and the inner one gets the next of SEQUENCE_AXES.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, get_type_hints

from spbench.impls.axes import ranks_along
from spbench.impls.options import Options, set_options
from spbench.impls.place import Place
from spbench.impls.registries import all_strategies, strategy_class

if TYPE_CHECKING:  # cells are checked and named with these, which needs no torch
    from spbench.impls.strategies.base import Strategy

#: axes over which sequences are spread, in the order in which strategies get them
SEQUENCE_AXES = ("sp", "cp")
PLUS = "+"


@dataclass(frozen=True)
class Nesting:
    """Classes of strategies, each around the next; in most cells one class alone.

    Raises:
        ValueError: the classes cannot stand around each other, or there are too few axes.
    """

    classes: tuple[type[Strategy], ...]

    def __post_init__(self) -> None:
        splitting = [cls.name for cls in self.classes[1:] if cls.splits_features]
        if splitting:
            raise ValueError(f"{splitting[0]} splits weights, which only the outermost strategy can")
        if not frozenset.intersection(*(cls.meets for cls in self.classes)):
            raise ValueError(f"{self.name}: there is no kind of attention that all of these have")
        for cls, within in zip(self.classes, self.classes[1:], strict=False):
            if not cls.can_enclose:
                mend = f"; write {within.name}{PLUS}{cls.name}" if within.can_enclose else ""
                raise ValueError(f"{cls.name} cannot be around another strategy{mend}")
            if not within.axes:
                raise ValueError(f"{within.name} uses no ranks; leave it out")
        _ = self.axes_of

    def __reduce__(self) -> tuple[Any, ...]:
        return Nesting, (self.classes,)  # without the cached options_type, which cannot be pickled

    @cached_property
    def name(self) -> str:
        """The names of the classes with plus signs between."""
        return PLUS.join(cls.name for cls in self.classes)

    @cached_property
    def axes_of(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each class, in the order of ``classes``."""
        of_classes: list[tuple[str, ...]] = []
        taken: set[str] = set()
        for cls in self.classes:
            axes = cls.axes
            if taken.intersection(axes):
                free = [axis for axis in SEQUENCE_AXES if axis not in taken]
                if len(axes) > 1 or not free:
                    raise ValueError(f"{self.name}: no axis is left for {cls.name}")
                axes = (free[0],)
            of_classes.append(axes)
            taken.update(axes)
        return tuple(of_classes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of all classes, one after another."""
        return tuple(axis for axes in self.axes_of for axis in axes)

    def sequence_ranks(self, sizes: Mapping[str, int]) -> int:
        """The number of ranks that share the tokens of a sequence between the layers."""
        return ranks_along([axis for axis in self.axes if axis != "tp"], sizes)

    @cached_property
    def requires(self) -> tuple[str, ...]:
        """The distributions that the classes require, each once."""
        return tuple(dict.fromkeys(name for cls in self.classes for name in cls.requires))

    @cached_property
    def options_type(self) -> type[Options]:
        """A frozen dataclass with the options of all classes; classes with an option of the same name share
        its value."""
        types = list(dict.fromkeys(cls.options_type for cls in self.classes))
        if len(types) == 1:
            return types[0]

        def check(self: Any) -> None:
            for each in types:
                each(**{f.name: getattr(self, f.name) for f in fields(each)})

        merged = {f.name: (f.name, get_type_hints(each)[f.name], f) for each in types for f in fields(each)}
        namespace = {"__post_init__": check}
        return make_dataclass(
            "NestedOptions", merged.values(), bases=(Options,), namespace=namespace, frozen=True
        )

    def configured(self, place: Place, options: Mapping[str, Any] | None = None, seed: int = 0) -> Strategy:
        """The outermost strategy, with the ``options`` that are named set for each class that has them.

        Raises:
            KeyError: no class has such an option; the message lists the options.
            ValueError: an option has an impossible value.
        """
        chosen = set_options(self.options_type(), options, f"strategy {self.name}")
        strategy: Strategy | None = None
        for cls, axes in reversed([*zip(self.classes, self.axes_of, strict=True)]):
            own = cls.options_type(**{f.name: getattr(chosen, f.name) for f in fields(cls.options_type)})
            strategy = cls(place, own, seed, within=strategy, axes=axes)
        assert strategy is not None
        return strategy

    def roles(self, axis: str, size: int) -> list[list[int]]:
        """:meth:`Strategy.roles` of the class that owns the axis."""
        return self.owner(axis).roles(axis, size)

    def owner(self, axis: str) -> type[Strategy]:
        """The class that owns the axis."""
        return next(cls for cls, axes in zip(self.classes, self.axes_of, strict=True) if axis in axes)

    def sizes_for(self, size: int) -> dict[str, int]:
        """:meth:`Strategy.sizes_for` of the outermost strategy."""
        return self.classes[0].sizes_for(size)

    def meshes(self, size: int) -> list[dict[str, int]]:
        """The meshes of ``size`` ranks, as sizes by axis, with more than one rank along each axis; for
        ``size`` 1 the mesh of one rank."""
        if size == 1:
            return [dict.fromkeys(self.axes, 1)]
        ways = itertools.product(range(2, size + 1), repeat=len(self.axes))
        return [dict(zip(self.axes, way, strict=True)) for way in ways if math.prod(way) == size]


def all_pairs() -> Iterator[Nesting]:
    """Yields every pair of registered strategies of which the first can stand around the second."""
    for outer, inner in itertools.permutations(all_strategies().values(), 2):
        try:
            yield Nesting((outer, inner))
        except ValueError:
            continue


@cache
def nesting(name: str) -> Nesting:
    """The nesting of the strategies in a name; most names are those of one strategy.

    Raises:
        KeyError: no such strategy is registered; the message lists the registered names.
        ValueError: the strategies cannot stand around each other.
    """
    return Nesting(tuple(strategy_class(part) for part in name.split(PLUS)))
