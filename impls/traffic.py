"""The bytes that ranks send: wire bytes of collectives, and the entries of closed forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from spbench.impls.axes import Sizes, ranks_along

#: share of the payload that one rank sends, as a function of the number of ranks N, for ring algorithms
#: (Thakur et al. 2005; nccl-tests PERFORMANCE.md). The payload is the whole tensor: the input of
#: all_reduce, reduce_scatter, all_to_all and broadcast, the output of all_gather.
WIRE_SHARE = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    # mean over ranks: the payload passes along a chain of N-1 links
    "broadcast": lambda n: Fraction(n - 1, n),
    "reduce": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}


def wire_bytes(collective: str, payload_bytes: int, size: int) -> Fraction:
    """Bytes that a rank sends (mean over the group) for one collective over ``size`` ranks."""
    return payload_bytes * WIRE_SHARE[collective](size)


@dataclass(frozen=True)
class Traffic:
    """A closed-form entry: ``count`` collectives of ``payload_bytes`` each in one phase of a step.

    ``phase`` is forward, backward, gradient_sync or optimizer; ``purpose`` is for the reader. ``axes`` are
    the mesh axes whose ranks form the group: all ranks together, or ``run`` of these ranks each
    (:meth:`Place.subgroup`). ``varies``: the payload is that of an even routing of tokens, from which ranks
    with values may deviate.
    """

    phase: str
    purpose: str
    collective: str
    count: int
    payload_bytes: int
    axes: tuple[str, ...] = ()
    run: int | None = None
    varies: bool = False

    def over(self, *axes: str) -> Traffic:
        """This entry, sent over the ranks along these axes."""
        return replace(self, axes=axes)

    def times(self, n: int) -> Traffic:
        """This entry with n times as many calls."""
        return replace(self, count=n * self.count)

    def group_size(self, sizes: Sizes) -> int:
        """The number of ranks of the group, on a mesh of these sizes."""
        return self.run or ranks_along(self.axes, sizes)

    def sent_bytes(self, size: int) -> Fraction:
        """The wire bytes that one of ``size`` ranks sends for this entry."""
        return self.count * wire_bytes(self.collective, self.payload_bytes, size)
