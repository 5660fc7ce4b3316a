"""Gated recurrences, Gated DeltaNet's and Mamba-2's, on a single device.

Between its projections such a layer acts on each head alone: a short convolution of its input, gates, and the
recurrence. The recurrence reaches all earlier positions through a state; the convolution reaches the W - 1
positions before.

Shape letters: B batch, L sequence, Z heads, G heads of queries and keys, D their size, A size of values, W
positions that a convolution sees.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.kernels.recurrence import Make, Rule, gated_recurrence
from spbench.impls.strategies.delegation import left_within

#: a function that acts on each head alone: (hooks of a strategy, tensors [B, L, heads, ...], weights
#: [heads, ...]) -> [B, L, Z, A]
Mix = Callable[["RecurrenceHooks", list[Tensor], Sequence[Tensor]], Tensor]


class RecurrenceHooks:
    """How do positions meet in a recurrence, and in the convolution before it? The defaults hold where this
    rank has all positions, for the heads of its own projections."""

    @left_within
    def mix_by_heads(self, mix: Mix, by_heads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """``mix`` applied to this rank's positions of all heads of its projections -> [B, L or a part, Z, A],
        where heads do not meet in ``mix``. Where positions meet, ``mix`` calls the hooks of the strategy that
        is its first argument.

        Args:
            by_heads: tensors [B, L or a part, Z or G, any size]; the list is emptied, so that each tensor is
                freed after its last use.
            weights: tensors [Z or G, ...].
        """
        return mix(self, by_heads, weights)

    @left_within
    def rows_before(self, rows: Tensor) -> Tensor | None:
        """The rows [B, W - 1, C] before this rank's positions, given the last W - 1 ``rows`` of this rank;
        None where the rank has all positions."""
        return None

    @left_within
    def document_starts(self, attended: Attended, length: int) -> Sequence[int]:
        """The starts of the documents of ``attended`` after the first document, counted from the first of
        this rank's ``length`` positions; negative starts are on ranks before."""
        return [end for end in attended.ends if end < length]

    @left_within
    def document_parts(self, attended: Attended, length: int) -> Sequence[int]:
        """The lengths of this rank's parts of documents in a sequence of ``length`` positions; the state
        starts from zero in each. Empty where all ranks have equal parts."""
        return ()

    @left_within
    def gated_recurrence(
        self,
        rule: type[Rule],
        *sources: Any,
        starts: Sequence[int] = (),
        make: Make | None = None,
    ) -> Tensor:
        """o [B, L or a part, Z, A] by a rule of :mod:`spbench.impls.kernels.recurrence`, from q, k [B, L or a
        part, G, D], v [B, L or a part, Z, A], g and b [B, L or a part, Z], and maybe d [Z]; with ``make``,
        ``sources`` are tensors from which ``make`` computes these. The state is zero before the sequence and
        at ``starts`` (:meth:`document_starts`)."""
        return gated_recurrence(rule, *sources, starts=starts, make=make)
