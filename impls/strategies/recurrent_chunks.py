"""Gated recurrences over chunks of a sequence: the state passes as in LASP or LASP-2, with maps of states.

A chunk maps the state S to M S + U (:mod:`spbench.impls.kernels.recurrence`); in linear attention a decay
that every rank can compute replaces M. The state before a chunk comes

- along the ranks, as in LASP (arXiv 2404.02882): a rank computes the map of its chunk, receives the state
  before its chunk, and sends M S + U on. So a rank's turn is one matmul, and it sends one state;
- from all maps, gathered as in LASP-2 (arXiv 2502.07563): each rank composes the maps of earlier chunks, so M
  is sent too. This is fla's context parallelism (ops/cp of flash-linear-attention).

Backward does the same with gradients of the states and the ranks in reverse. The convolution before the
recurrence needs the last W - 1 rows of the chunk before, sent by the neighbour, or gathered from all ranks as
in fla. The gradients of these rows go back by the same route.

Packed documents change no message: the map of a chunk in which a document begins has M = 0, and convolutions
ignore rows of another document.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.collectives import exchange, start_all_gather, with_gradient
from spbench.impls.kernels.recurrence import Make, Rule, StatePassing, gated_recurrence
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class Edge:
    """Bytes that pass a chunk's edge: a state, the chunk's map (``carry``), rows before a convolution."""

    state: int
    carry: int
    rows: int

    @classmethod
    def of(cls, site: Site, element_bytes: int) -> Edge:
        """The bytes at the edges of chunks for a site of the kind gated_recurrence."""
        d = site.dims
        states = d["B"] * d["Z"] * max(4, element_bytes)  # in at least float32
        rows = d["B"] * (d["W"] - 1) * (2 * d["G"] * d["D"] + d["Z"] * d["A"])
        return cls(states * d["D"] * d["A"], states * (d["D"] * d["A"] + d["M"]), rows * element_bytes)


class EdgePassing(StatePassing):
    """Passes states and rows over the edges of chunks: to higher ranks (``step`` 1), and their gradients to
    lower ranks (``step`` -1)."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    @abstractmethod
    def rows(self, rows: Tensor, step: int) -> Tensor:
        """Sends ``rows`` to the rank ``step`` after this rank, and returns those of the rank ``step`` before;
        zeros if there is no such rank."""

    @staticmethod
    @abstractmethod
    def messages(rank: int, size: int, step: int, nbytes: Edge) -> Iterator[tuple[str, str, int, int]]:
        """Yields a rank's messages at one site: (purpose, collective, count, payload bytes)."""


class Chain(EdgePassing):
    """Passes states and rows from neighbour to neighbour."""

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
    """All-gathers the maps and rows of all ranks on every rank."""

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


class RecurrentChunks(SequenceChunks):
    """Sequence chunks between which states and rows pass, by the class ``passing``."""

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

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind == "gated_recurrence":
                yield from self.recurrence_traffic(site, element_bytes)
            elif site.kind == "linear_attention":
                d = site.dims
                # states are in at least float32
                yield from self.state_traffic(site, d["B"] * d["Z"] * d["D"] * d["A"] * max(4, element_bytes))

    @abstractmethod
    def state_traffic(self, site: Site, state: int) -> Iterator[Traffic]:
        """Yields the messages of a site of linear attention, whose state has ``state`` bytes."""

    def recurrence_traffic(self, site: Site, element_bytes: int) -> Iterator[Traffic]:
        """Yields the messages of a gated recurrence and its convolution."""
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
                if payload:  # without a convolution no rows pass
                    yield Traffic(phase, of + purpose, collective, count * site.count, payload)

    def rows_before(self, rows: Tensor) -> Tensor | None:
        if self.group is None or self.size == 1:
            return super().rows_before(rows)
        return with_gradient(
            lambda x, passing, group: passing.rows(x.contiguous(), 1),
            lambda d_x, passing, group: passing.rows(d_x.contiguous(), -1),
            *(rows, self.passing(self.group), self.group),
        )

    def document_starts(self, attended: Attended, length: int) -> Sequence[int]:
        first = self.rank * length
        return [end - first for end in attended.ends if -length < end - first < length]

    def document_parts(self, attended: Attended, length: int) -> Sequence[int]:
        chunk = self.chunk(attended, length // self.size)
        return () if chunk is None else chunk.lengths

    def gated_recurrence(
        self,
        rule: type[Rule],
        *sources: Any,
        starts: Sequence[int] = (),
        make: Make | None = None,
    ) -> Tensor:
        if self.group is None or self.size == 1:
            return super().gated_recurrence(rule, *sources, starts=starts, make=make)
        return gated_recurrence(rule, *sources, passing=self.passing(self.group), starts=starts, make=make)
