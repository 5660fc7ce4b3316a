"""What a rank of an interleaved pipeline does in a step, in its order, as Megatron-LM has it
(core/pipeline_parallel/schedules.py of NVIDIA/Megatron-LM, commit d98e8a64).

A group of micro-batches passes through a chunk, then through the next; backward takes the chunks the other
way. A rank runs ahead of its first backward by 2 forwards for each rank after it, and by a group for each
chunk but one, then alternates. What a forward and the backward after it have made is sent when both are done,
and waited for (--no-overlap-p2p-communication); or each is sent when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

#: a method of a step, and the number of the forward or of the backward that it is or follows on; -1 is before
#: the first
Action = tuple[str, int]


class Turn(NamedTuple):
    """A forward or a backward of a micro-batch through one of a rank's chunks."""

    chunk: int
    micro_batch: int


class Ahead(NamedTuple):
    """A step of a rank with one stage: how many micro-batches it runs, and how many of them forward before
    the first backward."""

    micro_batches: int
    forwards: int


@dataclass(frozen=True)
class Turns:
    """The turns of one rank.

    Attributes:
        rank, ranks: which one of the pipeline this is.
        chunks: of this rank.
        group_size: micro-batches that pass through a chunk one after another, ``ranks`` or more; None:
            ``ranks``. The last group has what is left, which is not less than ``ranks`` either.
        overlapped: send each tensor when it is made, and wait for what is received when it is needed, once
            forwards and backwards alternate (--overlap-p2p-communication).
    """

    rank: int
    ranks: int
    chunks: int
    micro_batches: int
    group_size: int | None = None
    overlapped: bool = False

    @property
    def group(self) -> int:
        """Micro-batches of a group."""
        return self.group_size or self.ranks

    @cached_property
    def forwards(self) -> list[Turn]:
        """The forwards in their order."""
        edges = [*range(0, self.micro_batches, self.group), self.micro_batches]
        groups = [range(a, b) for a, b in pairwise(edges)]
        return [Turn(chunk, i) for each in groups for chunk in range(self.chunks) for i in each]

    @cached_property
    def backwards(self) -> list[Turn]:
        """The backwards in their order."""
        return [Turn(self.chunks - 1 - turn.chunk, turn.micro_batch) for turn in self.forwards]

    def __len__(self) -> int:
        """How many forwards there are."""
        return self.chunks * self.micro_batches

    @property
    def ahead(self) -> int:
        """How many forwards are run before the first backward follows on a forward."""
        return min(2 * (self.ranks - 1 - self.rank) + (self.chunks - 1) * self.group, len(self))

    def passes(self, chunk: int) -> Iterator[bool]:
        """A chunk's forwards (True) and backwards (False), in their order."""
        alternating = self.alternating(range(self.ahead, len(self)))
        for action, number in chain(self.warm_up(), alternating, self.cool_down()):
            if action in ("forward", "backward"):
                turns = self.forwards if action == "forward" else self.backwards
                if turns[number].chunk == chunk:
                    yield action == "forward"

    @property
    def period(self) -> int:
        """Forwards of a group through all chunks: as many later a rank does the same again, once it
        alternates."""
        return self.group * self.chunks

    @property
    def periods(self) -> int:
        """How many periods a rank alternates for. What follows on them ends the step: turns whose input is
        not received, the last backwards, and a last group of another size."""
        whole = self.micro_batches // self.group * self.period
        return max(0, whole - 1 - self.ahead) // self.period

    def warm_up(self) -> Iterator[Action]:
        """The actions before forwards and backwards alternate, in their order."""
        yield "pass_on", -1
        for i in range(self.ahead):
            yield from [("forward", i), ("pass_on", i)]
        yield "pass_back", -1

    def alternating(self, forwards: range) -> Iterator[Action]:
        """The actions of these forwards and of the backward after each."""
        for i in forwards:
            forward, backward, passed = (
                ("forward", i),
                ("backward", i - self.ahead),
                ("pass_back", i - self.ahead),
            )
            if self.overlapped:
                yield from [forward, ("pass_on", i), backward, passed, ("free", i)]
            else:
                yield from [forward, backward, ("pass_on", i), passed]

    def cool_down(self) -> Iterator[Action]:
        """The actions after the last forward, in their order."""
        for i in range(len(self) - self.ahead, len(self)):
            yield from [("backward", i), ("pass_back", i)]

    def gathered(self, number: int) -> int | None:
        """The chunk whose weights all ranks begin to gather at one time (--align-param-gather), before the
        forward of that number, while the first rank begins the chunk before it; None: no chunk."""
        lead = number + self.rank
        if lead >= len(self) or self.forwards[lead].micro_batch:
            return None
        chunk = self.forwards[lead].chunk + 1
        return chunk if 1 < chunk < self.chunks else None

    def posted(self, action: str, number: int) -> bool:
        """Whether a "pass_on" or a "pass_back" goes on before what it receives is there."""
        alternating = number >= self.ahead if action == "pass_on" else number < len(self) - self.ahead
        return self.overlapped and alternating

    def received(self, action: str, number: int) -> int | None:
        """The turn whose input (or gradient) a "pass_on" (or a "pass_back") receives; None: it receives none.

        A rank receives the input of its next turn; the first one what the last one, which is ranks - 1 turns
        behind, has just made, which may be for a later turn.
        """
        forward = action == "pass_on"
        turns, leader, step = (self.forwards, 0, 1) if forward else (self.backwards, self.ranks - 1, -1)
        if self.rank != leader:
            return number + 1 if number + 1 < len(turns) else None
        sent = number - (self.ranks - 1)
        if sent < 0 or not 0 <= turns[sent].chunk + step < self.chunks:
            return None
        return self._numbers[forward][turns[sent]._replace(chunk=turns[sent].chunk + step)]

    @cached_property
    def _numbers(self) -> tuple[dict[Turn, int], dict[Turn, int]]:
        """The number of each backward and of each forward."""
        backwards, forwards = ({turn: i for i, turn in enumerate(x)} for x in (self.backwards, self.forwards))
        return backwards, forwards
