"""Where queries, keys and values come from, for strategies that make them in parts: of some heads, of some
positions, in forward and again in backward. So no more of them is in memory than a part.

They are projected from hidden states, which the models implement, or given (:class:`GivenHeads`). Parts are
made and differentiated by hand, inside a strategy's own autograd function, which is given
:meth:`HeadSource.tensors` and returns their gradients.

Shape letters: B batch, L sequence (this rank's part of it), H hidden, Z heads, G heads of keys and values,
A head size; of a part, z, g and l of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from spbench.impls.attended import Attended

ALL = slice(None)


class HeadPart(NamedTuple):
    """Some heads of some positions. A head of keys and values serves Z/G heads of queries, which lie in
    ``runs`` runs of as many; a part has the same queries of each run of some groups.

    Attributes:
        groups: of the heads of keys and values.
        members: of each run of the queries of a group.
        positions: of this rank's; the tensors are those of these alone (:meth:`HeadSource.at`).
    """

    groups: slice = ALL
    members: slice = ALL
    runs: int = 1
    positions: slice = ALL

    def of_queries(self, x: Tensor, groups: int, dim: int) -> Tensor:
        """The part's heads of x [.., Z, ..] with all queries along ``dim``: a view [.., g, runs, m, ..]."""
        runs = x.unflatten(dim, (groups, self.runs, -1))
        return runs[(*[ALL] * dim, self.groups, ALL, self.members)]

    def of_keys(self, x: Tensor, dim: int) -> Tensor:
        """The part's heads of x [.., G, ..]: a view [.., g, ..]."""
        return x[(*[ALL] * dim, self.groups)]


class HeadSource(ABC):
    """Queries, keys and values of causal attention, whole or in parts.

    Attributes:
        heads, groups: Z and G.
        head_size: A.
        attended: what of the earlier positions a position attends to.
        sinks: of the heads [Z], which join the softmax (:mod:`spbench.impls.kernels.sinks`).
        position_dim: of the tensors that have positions.
        with_positions: how many tensors have positions; they are the first.
        needed: how many of these are needed again for gradients; they are the first.
    """

    heads: int
    groups: int
    head_size: int
    attended: Attended
    sinks: Tensor | None
    position_dim: int
    with_positions: int
    needed: int

    @property
    def in_parts(self) -> bool:
        """Whether parts can be made; else only :meth:`attend_whole` is there."""
        return True

    def at(self, tensors: Sequence[Tensor], positions: slice) -> list[Tensor]:
        """The tensors, or gradients of them, of some positions: views."""
        dims = [ALL] * self.position_dim
        first, others = tensors[: self.with_positions], tensors[self.with_positions :]
        return [*(x[(*dims, positions)] for x in first), *others]

    @abstractmethod
    def tensors(self, x: Tensor) -> Sequence[Tensor]:
        """What is differentiated; all other methods are given these again, or those of some positions."""

    @abstractmethod
    def queries(self, tensors: Sequence[Tensor], part: HeadPart) -> Tensor:
        """[B, z, l, A]."""

    @abstractmethod
    def keys_values(self, tensors: Sequence[Tensor], part: HeadPart) -> tuple[Tensor, Tensor]:
        """[B, g, l, A] each."""

    @abstractmethod
    def add_queries(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_q: Tensor
    ) -> None:
        """Add to the gradients of the tensors what follows from that of a part's queries."""

    @abstractmethod
    def add_keys_values(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_k: Tensor, d_v: Tensor
    ) -> None:
        """As :meth:`add_queries`, of a part's keys and values."""

    @abstractmethod
    def attend_whole(self, x: Tensor) -> Tensor:
        """The causal attention of all of them at once, as the model asks for it: [B, Z, L, A]."""


class GivenHeads(HeadSource):
    """Queries, keys and values that are there: q [B, Z, L, A], k, v [B, G, L, A] are the tensors. Their
    gradients need none of them."""

    position_dim, with_positions, needed = 2, 3, 0

    def __init__(self, q: Tensor, k: Tensor, attended: Attended, sinks: Tensor | None):
        self.heads, self.groups, self.head_size = q.shape[1], k.shape[1], q.shape[3]
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
