"""The order of a rank's forwards, backwards and messages in a step of a pipeline: 1F1B, GPipe, and the
interleaved pipeline of Megatron-LM (core/pipeline_parallel/schedules.py of NVIDIA/Megatron-LM, d98e8a64).

A group of micro-batches passes through a chunk, then through the next; backward takes the chunks the other
way. A rank runs ahead of its first backward by 2 forwards for each rank after it, and by a group for each
chunk but one, then alternates. The results of a forward and the backward after it are sent when both are
done, and waited for (--no-overlap-p2p-communication); or each result is sent when it is made.

1F1B is the schedule of ranks with one chunk each: a rank runs ahead by one forward for each rank after it. In
GPipe each rank runs ahead by all forwards. There a forward or backward sends and receives in its own phase.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from spbench.impls.composition import Stage

#: (name of a method of a step, number of the forward or backward that the method runs or follows); -1: before
#: the first one
Action = tuple[str, int]


class Turn(NamedTuple):
    """A forward or a backward of a micro-batch through one of a rank's chunks."""

    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Turns:
    """The turns of one rank in a step.

    Attributes:
        rank, ranks: this rank's number in the pipeline, and the number of ranks.
        chunks: the number of this rank's chunks.
        group_size: micro-batches that pass through a chunk one after another, ``ranks`` or more; None:
            ``ranks``. The last group has the rest, which is not less than ``ranks`` either.
        overlapped: once forwards and backwards alternate, send each tensor when it is made, and wait for a
            received tensor when it is needed (--overlap-p2p-communication).
    """

    rank: int
    ranks: int
    chunks: int
    micro_batches: int
    group_size: int | None = None
    overlapped: bool = False

    @classmethod
    def of(
        cls,
        schedule: str,
        stage: Stage,
        chunks: int,
        micro_batches: int,
        group_size: int | None = None,
        overlapped: bool = False,
    ) -> "Turns":
        """The turns of the rank that holds ``stage``, by the name of its schedule. In 1F1B and GPipe, ranks
        that run ahead by equally many forwards have equal turns: those of a first rank."""
        if schedule == "interleaved":
            return cls(stage.index, stage.count, chunks, micro_batches, group_size, overlapped)
        after = micro_batches if schedule == "gpipe" else stage.count - 1 - stage.index
        return cls(0, min(after, micro_batches) + 1, 1, micro_batches)

    @property
    def group(self) -> int:
        """The number of micro-batches in a group."""
        return self.group_size or self.ranks

    @cached_property
    def forwards(self) -> list[Turn]:
        """The rank's forwards in their order."""
        edges = [*range(0, self.micro_batches, self.group), self.micro_batches]
        groups = [range(a, b) for a, b in pairwise(edges)]
        return [Turn(chunk, i) for each in groups for chunk in range(self.chunks) for i in each]

    @cached_property
    def backwards(self) -> list[Turn]:
        """The rank's backwards in their order."""
        return [Turn(self.chunks - 1 - turn.chunk, turn.micro_batch) for turn in self.forwards]

    def __len__(self) -> int:
        """The number of forwards, which is that of backwards too."""
        return self.chunks * self.micro_batches

    @property
    def ahead(self) -> int:
        """The number of forwards before forwards and backwards alternate."""
        after = self.ranks - 1 - self.rank
        return min(after if self.chunks == 1 else 2 * after + (self.chunks - 1) * self.group, len(self))

    def passes(self, chunk: int) -> Iterator[bool]:
        """Yields the forwards (True) and backwards (False) of one chunk, in their order."""
        alternating = self.alternating(range(self.ahead, len(self)))
        for action, number in chain(self.warm_up(), alternating, self.cool_down()):
            if action in ("forward", "backward"):
                turns = self.forwards if action == "forward" else self.backwards
                if turns[number].chunk == chunk:
                    yield action == "forward"

    @property
    def period(self) -> int:
        """The number of forwards of a group through all chunks, after which an alternating rank repeats its
        actions."""
        return self.group * self.chunks

    @property
    def periods(self) -> int:
        """The number of whole periods in which a rank alternates. The step ends with other turns: those whose
        input is not received, the last backwards, and a last group of another size."""
        whole = self.micro_batches // self.group * self.period
        return max(0, whole - 1 - self.ahead) // self.period

    def warm_up(self) -> Iterator[Action]:
        """Yields the actions before forwards and backwards alternate, in their order."""
        yield "pass_on", -1
        for i in range(self.ahead):
            yield from [("forward", i), ("pass_on", i)]
        yield "pass_back", -1

    def alternating(self, forwards: range) -> Iterator[Action]:
        """Yields the actions of the forwards of these numbers, and of the backward after each."""
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
        """Yields the actions after the last forward, in their order."""
        for i in range(len(self) - self.ahead, len(self)):
            yield from [("backward", i), ("pass_back", i)]

    def gathered(self, number: int) -> int | None:
        """The chunk whose weights all ranks begin to gather together (--align-param-gather), before forward
        ``number``, when the first rank begins the chunk before; None: no chunk."""
        lead = number + self.rank
        if lead >= len(self) or self.forwards[lead].micro_batch:
            return None
        chunk = self.forwards[lead].chunk + 1
        return chunk if 1 < chunk < self.chunks else None

    def posted(self, action: str, number: int) -> bool:
        """Whether the action "pass_on" or "pass_back" returns before its received tensor has arrived."""
        alternating = number >= self.ahead if action == "pass_on" else number < len(self) - self.ahead
        return self.overlapped and alternating

    def received(self, action: str, number: int) -> int | None:
        """The number of the turn whose input (or gradient) a "pass_on" (or "pass_back") receives; None: none.

        A rank receives the input of its next turn. The first rank receives the result of the last rank, which
        is ranks - 1 turns behind, so the result may be for a later turn.
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
        """(numbers of backwards, numbers of forwards), each by turn."""
        backwards, forwards = ({turn: i for i, turn in enumerate(x)} for x in (self.backwards, self.forwards))
        return backwards, forwards
