"""Ranks in the middle of an interleaved pipeline, which differ only in how many forwards they run ahead.

They run the same forwards and backwards, by the same numbers; so the trace of one that runs further ahead is
put together from another's (:mod:`measure.engines.pipeline_stages`). A forward that only the first of them
runs in its warm-up is a copy of a forward of the other's warm-up through the same chunk; a backward after its
last forward likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from spbench.bench.measure.engines.listed import NotAlike
from spbench.impls.training.turns import Action, Turns

_FORWARD, _BACKWARD = ("forward", "pass_on"), ("backward", "pass_back")
#: what a rank begins with, in two phases: a step, and to gather the weights of its first chunks
_BEGINS: Action = ("begins", -1)
#: by how many numbers an action may differ from another whose tensors it frees or waits for, in its direction
_NEAR = 2


@dataclass(frozen=True)
class InterleavedTurns:
    """The actions of a rank of an interleaved pipeline, by their places in a step; see :class:`Turns` of
    :mod:`measure.engines.pipeline_stages`."""

    of: Turns

    @property
    def ahead(self) -> int:
        """Forwards before the first backward."""
        return self.of.ahead

    @property
    def order(self) -> tuple[int, ...]:
        """By chunk, whether its first forward of a group comes after the backward of its last forward (-1),
        right after it (0), or before it (1). Megatron-LM keeps a chunk's last input, with its gradient, until
        the next one, so these die elsewhere."""
        apart = (self.ahead - 2 * chunk * self.of.group for chunk in range(self.of.chunks))
        return tuple((by > 0) - (by < 0) for by in apart)

    @property
    def complete(self) -> bool:
        """Whether the rank is neither the first nor the last, and alternates for longer than it warms up."""
        return 0 < self.of.rank < self.of.ranks - 1 and len(self.of) > 2 * self.ahead

    @cached_property
    def actions(self) -> list[Action]:
        """Those that begin phases, in order."""
        alternating = self.of.alternating(range(self.ahead, len(self.of)))
        every = chain(self.of.warm_up(), alternating, self.of.cool_down())
        return [_BEGINS, *(action for action in every if action[0] != "free")]

    @cached_property
    def _places(self) -> dict[Action, int]:
        return {action: place for place, action in enumerate(self.actions)}

    @cached_property
    def _latest(self) -> list[tuple[int, int]]:
        """Of each place, and of the end, the numbers of the last forward and backward up to there."""
        forward, backward, latest = -1, -1, []
        for name, number in self.actions:
            forward = number if name == "forward" else forward
            backward = number if name == "backward" else backward
            latest.append((forward, backward))
        return [*latest, (forward, backward)]

    @cached_property
    def _forward_of(self) -> list[int]:
        """Of each backward, the number of its forward."""
        numbers = {turn: number for number, turn in enumerate(self.of.forwards)}
        return [numbers[turn] for turn in self.of.backwards]

    def __len__(self) -> int:
        return len(self.actions)

    def phases(self, place: int) -> list[str]:
        """The phases of an action."""
        name, number = action = self.actions[place]
        if action == _BEGINS or (name == "forward" and self.of.gathered(number) is not None):
            return ["forward", "forward"]
        return ["backward" if name in _BACKWARD else "forward"]

    def like(self, place: int, other: InterleavedTurns) -> int:
        """The place of the action of another rank that does what this rank does at a place.

        Raises:
            NotAlike: the other runs further ahead, or has none.
        """
        if place == len(self):
            return len(other)
        name, number = self.actions[place]
        if other.ahead > self.ahead:
            raise NotAlike("another rank does not run as far ahead")
        count = len(self.of)
        if name == "forward" and self.of.gathered(number) is not None:
            return other._places[name, number + self.of.rank - other.of.rank]
        gathers = name == "forward" and other.of.gathered(number) is not None
        if name in _FORWARD and (gathers or other.ahead <= number < self.ahead):
            chunk = self.of.forwards[number].chunk
            # the first micro-batch of a chunk may wait for its weights
            alike = (i for i in range(other.ahead) if other.of.forwards[i] == (chunk, 1))
        elif name in _BACKWARD and count - self.ahead <= number < count - other.ahead:
            chunk, last = self.of.backwards[number].chunk, self.of.micro_batches - 2
            alike = (i for i in range(count - other.ahead, count) if other.of.backwards[i] == (chunk, last))
        else:
            return other._places[name, number]
        if (same := next(alike, None)) is None:
            raise NotAlike(f"no {name} of chunk {chunk} is alike")
        return other._places[name, same]

    def moved(self, place: int, of: int, other: InterleavedTurns, to: int) -> int:
        """The place that the action at place ``to`` of another rank refers to, where its like, at ``place``
        of this rank, refers to place ``of``.

        Raises:
            NotAlike: the other has no such action.
        """
        if of == len(self):
            return len(other)
        name, number = self.actions[of]
        forwards = name in _FORWARD
        if place < len(self):
            acts, at = self.actions[place]
            there = other.actions[to][1]
            if forwards and acts in _BACKWARD and at >= 0:
                mine, theirs = self._forward_of[at], other._forward_of[there]
            elif (acts in _FORWARD) == forwards:
                mine, theirs = at, there
            else:
                mine, theirs = (each[not forwards] for each in (self._latest[place], other._latest[to]))
            near = abs(number - mine) <= _NEAR
            if not near and forwards and acts in _BACKWARD:
                mine, theirs = self._latest[place][0], other._latest[to][0]
                near = abs(number - mine) <= _NEAR
            if near:
                number += theirs - mine
            elif name == "forward" and self.of.gathered(number) is not None:
                number += self.of.rank - other.of.rank
        if (name, number) not in other._places:
            raise NotAlike(f"there is no {name} {number}")
        return other._places[name, number]
