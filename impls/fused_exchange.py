"""An all-to-all that permutes on the way: its kernel reads strided memory and writes it on the other ranks.

Ulysses permutes a tensor before an all-to-all, so that what each rank gets lies without gaps, and once more
after it. In symmetric memory, which all ranks of a node map, one kernel reads a rank's pieces where they lie
and writes them where the other rank needs them (fast-ulysses; flashinfer #3820). Ranks send the same bytes,
and the two copies are no work of their own (:data:`spbench.impls.kernels.permutation.WITHIN_TRANSFERS`). The
transfer itself keeps the rate of the all-to-all. Real ranks here copy and then call the all-to-all, so their
values are the same bit by bit.
"""

from functools import partial

from torch import Tensor

from spbench.impls.collectives import Group, exchanged, exchanged_back, with_gradient
from spbench.impls.kernels.permutation import exchanged_pieces


def _without_gaps(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else exchanged_pieces(x)


_exchanged, _exchanged_back = (partial(each, packed=_without_gaps) for each in (exchanged, exchanged_back))


def fused_all_to_all(x: Tensor, split_dim: int, gather_dim: int, group: Group) -> Tensor:
    """:func:`spbench.impls.collectives.all_to_all` without copies before and after it."""
    return with_gradient(_exchanged, _exchanged_back, x, split_dim, gather_dim, group)
