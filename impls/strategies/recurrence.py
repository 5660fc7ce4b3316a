"""Gated recurrences, Gated DeltaNet's and Mamba-2's, on a single device.

What lies between the projections of such a layer acts on each head alone: a short convolution of what comes
in, gates, and the recurrence. The recurrence meets all positions before a position, by way of a state; the
convolution meets the W - 1 before it.

Shape letters: B batch, L sequence, Z heads, G heads of queries and keys, D their size, A size of values, W
positions that a convolution sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.kernels.recurrence import Rule, gated_recurrence
from spbench.impls.strategies.delegation import left_within

if TYPE_CHECKING:
    from spbench.impls.strategies.base import Strategy

#: of a strategy, tensors [B, L, heads, ...] and weights [heads, ...]: a result [B, L, Z, A]
Mix = Callable[["Strategy", Sequence[Tensor], Sequence[Tensor]], Tensor]


class RecurrenceHooks:
    """How do positions meet in a recurrence, and in the convolution before it? The defaults hold where this
    rank has all positions, of the heads that its projections made."""

    @left_within
    def mix_by_heads(self, mix: Mix, by_heads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """``mix`` of this rank's positions of all heads that its projections made, [B, L or a part, Z, A],
        where heads do not meet in ``mix``; it asks the strategy that it is given for what meets there.

        Args:
            by_heads: [B, L or a part, Z or G, any size] each.
            weights: [Z or G, ...] each.
        """
        return mix(self, by_heads, weights)  # type: ignore[arg-type]

    @left_within
    def rows_before(self, rows: Tensor) -> Tensor | None:
        """The rows [B, W - 1, C] that stand before this rank's positions, given the last ``rows`` of these;
        None where they are the first of the sequence."""
        return None

    @left_within
    def document_starts(self, attended: Attended, length: int) -> Sequence[int]:
        """Where the documents of ``attended`` begin, counted from the first of this rank's ``length``
        positions, but for the sequence's first; negative ones lie before these."""
        return [end for end in attended.ends if end < length]

    @left_within
    def document_parts(self, attended: Attended, length: int) -> Sequence[int]:
        """The lengths of the parts of documents that this rank has of a sequence of ``length`` positions,
        where its states begin anew in each; none where all ranks have the same."""
        return ()

    @left_within
    def gated_recurrence(
        self,
        rule: type[Rule],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        b: Tensor,
        starts: Sequence[int] = (),
    ) -> Tensor:
        """o [B, L or a part, Z, A] by a rule of :mod:`spbench.impls.kernels.recurrence`, from a state of zero
        before the sequence and at ``starts``, as :meth:`document_starts` has them: q, k [B, L or a part, G,
        D], v [B, L or a part, Z, A], g and b [B, L or a part, Z]."""
        return gated_recurrence(rule, q, k, v, g, b, starts=starts)
