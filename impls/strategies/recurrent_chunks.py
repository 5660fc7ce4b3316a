"""Gated recurrences over chunks of a sequence: LASP's and LASP-2's ways to pass states, for maps of states.

What a chunk does to the state is S -> M S + U (:mod:`spbench.impls.kernels.recurrence`), where linear
attention has a decay that every rank knows in place of M. Two ways to the state before a chunk:

- along the ranks, as LASP (arXiv 2404.02882): a rank works out the map of its chunk, receives the state
  before it, and sends on M S + U, so that what ranks do in turn is one product; one state is sent;
- all maps gathered, as LASP-2 (arXiv 2502.07563), of which each rank puts together those before its own: M
  is sent too. This is fla's context parallelism (ops/cp of flash-linear-attention).

Backward likewise, with gradients of the states and the ranks in reverse. The convolution before the
recurrence needs the last W - 1 rows of the chunk before, which the neighbour sends, or which are gathered
from all ranks, as fla does it; their gradients go back the same way.

Packed documents change no message: the map of a chunk in which one begins has M = 0, and convolutions do not
look at rows of another document.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.collectives import exchange, start_all_gather
from spbench.impls.kernels.recurrence import Rule, StatePassing, gated_recurrence
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class Edge:
    """Bytes of what is at a chunk's edge: a state, the map of states of the chunk, rows before
    convolutions."""

    state: int
    carry: int
    rows: int

    @classmethod
    def of(cls, site: Site, element_bytes: int) -> Edge:
        """Of a site of the kind gated_recurrence."""
        d = site.dims
        states = d["B"] * d["Z"] * max(4, element_bytes)  # in at least float32
        rows = d["B"] * (d["W"] - 1) * (2 * d["G"] * d["D"] + d["Z"] * d["A"])
        return cls(states * d["D"] * d["A"], states * (d["D"] * d["A"] + d["M"]), rows * element_bytes)


class EdgePassing(StatePassing):
    """What ranks tell each other of the edges of their chunks. It goes to higher ranks (``step`` 1), its
    gradient to lower ones (``step`` -1)."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    @abstractmethod
    def rows(self, rows: Tensor, step: int) -> Tensor:
        """The ``rows`` of the rank that is ``step`` before this one, zeros where there is none."""

    @staticmethod
    @abstractmethod
    def messages(rank: int, size: int, step: int, nbytes: Edge) -> Iterator[tuple[str, str, int, int]]:
        """What a rank sends: (purpose, collective, count, payload bytes)."""


class Chain(EdgePassing):
    """From neighbour to neighbour: states and rows."""

    def state(
        self, rule: type[Rule], carry: Callable[[], Tensor], empty: Callable[[], Tensor], step: int
    ) -> Tensor | None:
        own = carry() if self._is_rank(self.rank + step) else None
        state = empty() if self._is_rank(self.rank - step) else None
        if state is not None:
            exchange([], [(state, self.rank - step)], self.group)
        if own is not None:
            size = empty().shape[-2:]
            exchange([(rule.merged(own.unsqueeze(0), size, [0], state), self.rank + step)], [], self.group)
        return state

    def rows(self, rows: Tensor, step: int) -> Tensor:
        received = torch.zeros_like(rows)
        sends = [(rows, self.rank + step)] if self._is_rank(self.rank + step) else []
        receives = [(received, self.rank - step)] if self._is_rank(self.rank - step) else []
        exchange(sends, receives, self.group)
        return received

    def _is_rank(self, number: int) -> bool:
        return 0 <= number < self.size

    @staticmethod
    def messages(rank: int, size: int, step: int, nbytes: Edge) -> Iterator[tuple[str, str, int, int]]:
        count = int(0 <= rank + step < size)
        yield "state", "send", count, nbytes.state
        yield "rows before convolutions", "send", count, nbytes.rows


class Gather(EdgePassing):
    """All ranks' maps and rows to all."""

    def state(
        self, rule: type[Rule], carry: Callable[[], Tensor], empty: Callable[[], Tensor], step: int
    ) -> Tensor | None:
        carries, arrival = start_all_gather(carry(), self.group)
        size = empty().shape[-2:]
        arrival.wait()
        before = range(self.rank) if step > 0 else range(self.size - 1, self.rank, -1)
        return rule.merged(carries, size, before)

    def rows(self, rows: Tensor, step: int) -> Tensor:
        of_all, arrival = start_all_gather(rows, self.group)
        arrival.wait()
        # a copy, which does not keep the rows of all ranks
        before = self.rank - step
        return of_all[before].clone() if 0 <= before < self.size else torch.zeros_like(rows)

    @staticmethod
    def messages(rank: int, size: int, step: int, nbytes: Edge) -> Iterator[tuple[str, str, int, int]]:
        yield "maps of states", "all_gather", 1, size * nbytes.carry
        yield "rows before convolutions", "all_gather", 1, size * nbytes.rows


class _RowsBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, passing: EdgePassing) -> Tensor:
        ctx.passing = passing
        return passing.rows(rows.contiguous(), 1)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        return ctx.passing.rows(d_rows.contiguous(), -1), None


class RecurrentChunks(SequenceChunks):
    """Sequence chunks that pass the states and rows at their edges, in the way of ``passing``."""

    passing: ClassVar[type[EdgePassing]]

    def check_sizes(self, sites: Sequence[Site]) -> None:
        super().check_sizes(sites)
        for site in sites:
            rows, length = site.dims.get("W", 1) - 1, site.dims.get("L", 0) // self.size
            if site.kind == "gated_recurrence" and length < rows:
                raise Unsupported(
                    f"chunks of {length} positions lack some of the {rows} rows that convolutions pass on",
                    f"use a sequence length of at least {self.size * rows}",
                )

    def recurrence_traffic(self, site: Site, element_bytes: int) -> Iterator[Traffic]:
        """What a gated recurrence and its convolution send."""
        nbytes = Edge.of(site, element_bytes)
        for phase, step in [
            ("forward", 1),
            *([("backward", 1)] if site.recomputed else []),
            ("backward", -1),
        ]:
            of = "" if step > 0 else "gradients: "
            for purpose, collective, count, payload in self.passing.messages(
                self.rank, self.size, step, nbytes
            ):
                yield Traffic(phase, of + purpose, collective, count * site.count, payload)

    def rows_before(self, rows: Tensor) -> Tensor | None:
        if self.group is None or self.size == 1:
            return super().rows_before(rows)
        return _RowsBefore.apply(rows, self.passing(self.group))

    def document_starts(self, attended: Attended, length: int) -> Sequence[int]:
        first = self.rank * length
        return [end - first for end in attended.ends if -length < end - first < length]

    def document_parts(self, attended: Attended, length: int) -> Sequence[int]:
        chunk = self.chunk(attended, length // self.size)
        return () if chunk is None else chunk.lengths

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
        if self.group is None or self.size == 1:
            return super().gated_recurrence(rule, q, k, v, g, b, starts)
        return gated_recurrence(rule, q, k, v, g, b, self.passing(self.group), starts)
