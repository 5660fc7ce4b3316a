"""The sources of queries, keys and values for strategies that compute them in parts: some heads at some
positions, in forward and again in backward. So memory holds no more than a part.

A source projects the heads from hidden states (models implement this), or holds heads that exist already
(:class:`GivenHeads`). A strategy's own autograd function computes and differentiates parts by hand: it takes
:meth:`HeadSource.tensors` and returns the gradients of these tensors.

Shape letters: B batch, L sequence (this rank's part), H hidden, Z heads, G heads of keys and values, A head
size; z, g and l are Z, G and L of a part.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from spbench.impls.attended import Attended

ALL = slice(None)


class HeadPart(NamedTuple):
    """Some heads at some positions. A group is one head of keys and values and its Z/G heads of queries,
    which lie in ``runs`` runs of equal length; a part has the same members of each run, for some groups.

    Attributes:
        groups: the part's heads of keys and values.
        members: the part's heads of queries in each run of a group.
        positions: the part's positions among this rank's; :meth:`HeadSource.at` cuts tensors to these.
    """

    groups: slice = ALL
    members: slice = ALL
    runs: int = 1
    positions: slice = ALL

    def of_queries(self, x: Tensor, groups: int, dim: int) -> Tensor:
        """The part's heads of queries x [.., Z, ..] with Z at ``dim``: a view [.., g, runs, members, ..]."""
        runs = x.unflatten(dim, (groups, self.runs, -1))
        return runs[(*[ALL] * dim, self.groups, ALL, self.members)]

    def of_keys(self, x: Tensor, dim: int) -> Tensor:
        """The part's heads of keys or values x [.., G, ..] with G at ``dim``: a view [.., g, ..]."""
        return x[(*[ALL] * dim, self.groups)]


class HeadSource(ABC):
    """Queries, keys and values of causal attention, whole or in parts.

    Attributes:
        heads, groups: Z and G.
        head_size, value_size: features of a query and a key, and of a value: A both, but in latent attention.
        attended: which earlier positions a position attends to.
        sinks: logits of the heads [Z] that join the softmax (:mod:`spbench.impls.kernels.sinks`).
        position_dim: the dim of positions in the tensors that have positions.
        with_positions: number of tensors with positions, which are the first tensors.
        needed: number of tensors with positions that gradients need again, which are the first of all.
    """

    heads: int
    groups: int
    head_size: int
    value_size: int
    attended: Attended
    sinks: Tensor | None
    position_dim: int
    with_positions: int
    needed: int

    @property
    def in_parts(self) -> bool:
        """Whether the source can compute parts; if not, only :meth:`attend_whole` may be called."""
        return True

    def at(self, tensors: Sequence[Tensor], positions: slice) -> list[Tensor]:
        """The tensors, or their gradients, as views at ``positions``; those without positions stay whole."""
        dims = [ALL] * self.position_dim
        first, others = tensors[: self.with_positions], tensors[self.with_positions :]
        return [*(x[(*dims, positions)] for x in first), *others]

    @abstractmethod
    def tensors(self, x: Tensor) -> Sequence[Tensor]:
        """The tensors to differentiate, made from hidden states x: the argument of the other methods."""

    @abstractmethod
    def queries(self, tensors: Sequence[Tensor], part: HeadPart) -> Tensor:
        """The queries of a part [B, z, l, A]."""

    @abstractmethod
    def keys_values(self, tensors: Sequence[Tensor], part: HeadPart) -> tuple[Tensor, Tensor]:
        """The keys and values of a part, [B, g, l, A] each."""

    @abstractmethod
    def add_queries(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_q: Tensor
    ) -> None:
        """Add to ``gradients`` of the tensors the contribution of d_q, the gradient of a part's queries."""

    @abstractmethod
    def add_keys_values(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_k: Tensor, d_v: Tensor
    ) -> None:
        """Add to ``gradients`` the contribution of d_k and d_v, the gradients of a part's keys and values."""

    @abstractmethod
    def attend_whole(self, x: Tensor) -> Tensor:
        """Causal attention of all heads at once, as the model asks for it: [B, Z, L, A]."""


class GivenHeads(HeadSource):
    """Queries, keys and values that exist already: the tensors are q [B, Z, L, A], k, v [B, G, L, A].
    Backward needs none of these tensors again."""

    position_dim, with_positions, needed = 2, 3, 0

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended, sinks: Tensor | None):
        self.heads, self.groups, self.head_size, self.value_size = q.shape[1], *k.shape[1::2], v.shape[3]
        self.attended, self.sinks = attended, sinks

    def tensors(self, x: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError("they are given")

    def attend_whole(self, x: Tensor) -> Tensor:
        raise NotImplementedError("they are given")

    def queries(self, tensors: Sequence[Tensor], part: HeadPart) -> Tensor:
        return part.of_queries(tensors[0], self.groups, 1).flatten(1, 3)

    def keys_values(self, tensors: Sequence[Tensor], part: HeadPart) -> tuple[Tensor, Tensor]:
        _, k, v = tensors
        return part.of_keys(k, 1), part.of_keys(v, 1)

    def add_queries(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_q: Tensor
    ) -> None:
        into = part.of_queries(gradients[0], self.groups, 1)
        into.add_(d_q.view(into.shape))

    def add_keys_values(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_k: Tensor, d_v: Tensor
    ) -> None:
        for gradient, of_part in zip(gradients[1:], (d_k, d_v), strict=True):
            part.of_keys(gradient, 1).add_(of_part)
