"""The turns of a pipeline stage: what it does when, and which turns of another stage are like them.

Time is counted in turns: turn t runs the forward of micro-batch t and the backward of micro-batch t - ahead,
where there are these. So a step has a warm-up of forwards, a steady state of both, and an end of backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

#: turns of one kind that are told apart before they repeat; what a turn frees or waits for is of one of as
#: many turns before it, or of its micro-batch's forward
_APART = 2
#: the fewest micro-batches held by a stage whose parts others are put together from
_FEWEST = 2 * _APART
#: the phases of a turn; all others come after the last turn
OF_TURNS = ("forward", "backward")


class NotAlike(ValueError):
    """A trace is not made of turns that depend only on how many micro-batches the stage holds."""


@dataclass(frozen=True)
class Turns:
    """The turns of a step: of ``count`` micro-batches, ``ahead`` of which run forward before the first
    backward."""

    count: int
    ahead: int

    def __len__(self) -> int:
        return self.count + self.ahead

    def phases(self, turn: int) -> list[str]:
        """The phases of a turn, in order."""
        return [*OF_TURNS[turn >= self.count : 1 + (turn >= self.ahead)]]

    @property
    def complete(self) -> bool:
        """Whether turns of every kind occur."""
        return self.ahead >= _FEWEST and self.count > 2 * self.ahead + _APART

    def like(self, turn: int, other: Turns) -> int:
        """The turn of another stage that does what this stage does in a turn; both :attr:`complete`."""
        back = turn - self.ahead
        if turn < self.ahead:
            return min(turn, _APART)
        if back < self.ahead:  # of a micro-batch of the warm-up
            return other.ahead + min(back, _APART)
        if turn < self.count - 1:
            return 2 * other.ahead + min(back - self.ahead, _APART)
        if turn in (self.count - 1, len(self) - 1, len(self)):
            return turn - self.count + other.count if turn < self.count else turn - len(self) + len(other)
        return other.count + min(turn - self.count, _APART)

    def moved(self, turn: int, of: int, other: Turns, to: int) -> int:
        """The turn that turn ``to`` of another stage refers to, where its like, ``turn`` of this stage,
        refers to turn ``of``.

        Raises:
            NotAlike: it cannot be told which.
        """
        by = turn - of
        if turn < len(self):
            if by <= _APART:
                return to - by
            if by - self.ahead in (0, 1):  # what the micro-batch's forward made, or received before it
                return to - by + self.ahead - other.ahead
        else:  # the end of the step refers to the first and the last turns of each kind
            for mine, theirs in ((len(self), len(other)), (self.count, other.count)):
                if abs(of - mine) <= _APART:
                    return of - mine + theirs
            if of <= 1 or of - self.ahead in (0, 1):
                return of if of <= 1 else of - self.ahead + other.ahead
        raise NotAlike(f"turn {turn} refers to turn {of}")
