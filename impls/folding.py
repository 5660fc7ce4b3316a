"""Axes of experts, folded over the ranks of a pipeline stage (Liu et al., arXiv 2504.14960).

The mesh arranges a stage's ranks for attention, by dp, cp, tp, sp and the axes of strategies. Layers with
experts arrange the same ranks by edp x ep x etp: sizes give ep and etp, and edp is the quotient.
A stage's ranks are numbered s = 0, 1, ... in the order of the mesh without pp, its last axis fastest. Then

    etp = s % ETP,   ep = s // ETP % EP,   edp = s // (ETP EP)

for ETP ranks along etp and EP along ep. So folded axes add no ranks: a mapping of sizes has them next to the
axes of the mesh, and the number of ranks is that of the mesh.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

#: the folded axes that sizes may have: ranks among which the experts are shared out, and ranks among which
#: the features of each expert are split
FOLDED_AXES = ("ep", "etp")
#: all folded axes, from the slowest-varying rank of a stage to the fastest; ranks along edp hold copies of
#: the same experts
EXPERT_AXES = ("edp", *FOLDED_AXES)


def folds(axes: Iterable[str]) -> bool:
    """Whether these are folded axes.

    Raises:
        ValueError: some are folded, and others are axes of the mesh.
    """
    axes = list(axes)
    are = {axis in EXPERT_AXES for axis in axes}
    if len(are) > 1:
        raise ValueError(f"{', '.join(axes)}: folded axes have no groups together with axes of the mesh")
    return are == {True}


def folded_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of ranks along each of EXPERT_AXES, from the sizes of a cell."""
    of = {axis: sizes.get(axis, 1) for axis in FOLDED_AXES}
    return {"edp": stage_ranks(sizes) // math.prod(of.values()), **of}


def given_folds(sizes: Mapping[str, int]) -> dict[str, int]:
    """The entries of ``sizes`` for FOLDED_AXES that have more than one rank."""
    return {axis: sizes[axis] for axis in FOLDED_AXES if sizes.get(axis, 1) > 1}


def stage_ranks(sizes: Mapping[str, int]) -> int:
    """The number of ranks of a pipeline stage."""
    return math.prod(size for axis, size in sizes.items() if axis not in ("pp", *FOLDED_AXES))


def world_ranks(sizes: Mapping[str, int]) -> int:
    """The number of ranks of the whole mesh."""
    return stage_ranks(sizes) * sizes.get("pp", 1)


def check_folds(sizes: Mapping[str, int]) -> None:
    """Raise ValueError if ep x etp does not divide the ranks of a stage; the message names sizes that do."""
    ranks, (ep, etp) = stage_ranks(sizes), (sizes.get(axis, 1) for axis in FOLDED_AXES)
    if ranks % (ep * etp) == 0:
        return
    if ranks % etp:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        mend = f"set etp to {_listed(fitting)}"
    else:
        mend = f"set ep to {_listed([n for n in range(1, ranks + 1) if ranks // etp % n == 0])}"
    text = f"ep {ep}" + (f" x etp {etp}" if etp > 1 else "")
    raise ValueError(f"{text} does not divide the {ranks} ranks of a pipeline stage; {mend}")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])


def folded_place(number: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coordinates along EXPERT_AXES of the rank with this number in its stage."""
    place = {}
    for axis, size in reversed(folded_sizes(sizes).items()):
        number, place[axis] = divmod(number, size)
    return place


def members(number: int, axes: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """The numbers in their stage of the ranks that differ from rank ``number`` only along ``axes``."""
    others = [axis for axis in EXPERT_AXES if axis not in axes]
    own = folded_place(number, sizes)
    return [
        other
        for other in range(stage_ranks(sizes))
        if all(folded_place(other, sizes)[axis] == own[axis] for axis in others)
    ]
