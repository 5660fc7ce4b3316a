"""The actions of a pipeline's rank in a step. By them the trace of a long step is put together from the trace
of a short step (:mod:`measure.engines.tracing`).

A rank holds one run of layers or, in an interleaved schedule, several runs (chunks). A step has a warm-up of
forwards, a steady state that alternates forwards and backwards, and an end of backwards; each of these
stretches has turns that are alike. A short step is the step of a rank of the same kind (the first, the last,
or one between them) in a pipeline of fewer ranks, with a few micro-batches. Each action of the long step is a
copy of an action of the short step with the same chunk, the same stretch, and a like micro-batch (the first,
the last, or another). The tensors that an action frees or waits for belong to an action near it, to its
micro-batch's forward, to the micro-batch before it in its chunk, or to the first or last ones of a chunk.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Self

from spbench.bench.measure.engines.listed import NotAlike
from spbench.impls import Action, Turn, Turns

_FORWARD, _BACKWARD = ("forward", "pass_on"), ("backward", "pass_back")
#: the actions that begin a phase; ranks with one chunk have only the first two
_PHASES = ("forward", "backward", "pass_on", "pass_back")
#: the action that begins a rank's step: it zeroes gradients, or gathers the weights of the first chunks
_BEGINS: Action = ("begins", -1)
#: the most forwards (or backwards) between an action and an earlier one whose tensors it frees or waits for
_NEAR = 2
#: micro-batches in a group of a short step: a first one, a last one, and one or two between them
_SHORT_GROUPS = (3, 4)
#: groups of micro-batches in a short step: the first, the last, and one between them
_GROUPS = 3
#: the turns of a repeating steady state, and of the two ends of a short step in which none repeats
_FEWEST = 2 * _NEAR
#: the most micro-batches of a short step of one run of layers
SHORT = 3 * _FEWEST + 1
#: the number of the stretch (:meth:`RankTurns._stretch`) whose turns are all alike: the steady state
_ALTERNATES = 2


@dataclass(frozen=True)
class RankTurns:
    """The actions of a rank of a pipeline, by their places in a step.

    Attributes:
        of: the forwards and backwards, in order.
        begins: whether the step begins with a phase of its own, before the first action.
        gathers: whether a pass gathers weights that the pass before it has not left gathered, so that turns
            depend on the order of passes.
        counts: whether a turn's host work may depend on how many turns came before, as in ``fully_shard``.
    """

    of: Turns
    begins: bool = False
    gathers: bool = False
    counts: bool = False

    @property
    def ahead(self) -> int:
        """The number of forwards before the first backward."""
        return self.of.ahead

    @property
    def _lead(self) -> list[int]:
        """For each chunk, by how many forwards its first forward of a group comes before (above 0) or after
        (below 0) the backward of its last forward; then the warm-up forwards beyond the last chunk."""
        leads = [self.ahead - 2 * chunk * self.of.group for chunk in range(self.of.chunks)]
        return [*leads, self.ahead - self.of.period]

    @property
    def _order(self) -> list[int]:
        """The signs of :attr:`_lead`. They matter because Megatron-LM keeps a chunk's last input, with its
        gradient, until the next one."""
        return [(each > 0) - (each < 0) for each in self._lead]

    @property
    def _touching(self) -> list[bool]:
        """For each chunk, whether a forward directly follows a backward, which frees the chunk's input."""
        return [each == -1 for each in self._lead]

    @property
    def _end(self) -> int:
        """The end of the pipeline at which the rank is: -1 the first, 1 the last, 0 neither."""
        return (self.of.rank == self.of.ranks - 1) - (self.of.rank == 0)

    def shorter(self) -> Iterator[Self]:
        """Yield the short steps from which this step may be put together, the shortest first."""
        of = self.of
        if of.chunks == 1:
            yield from self._shorter_of_one_chunk()
            return
        # with overlapped sends a rank waits in turns that the kinds below do not tell apart
        if self.gathers or of.overlapped or of.group != of.ranks or of.micro_batches % of.group:
            return
        # a whole step runs three periods once it alternates
        least = min(len(of), self.ahead + 3 * of.period)
        of_groups: list[Self] = []
        for group in _SHORT_GROUPS:
            ranks = ((rank, group + more) for more in range(2) for rank in range(group + more))
            steps = (
                replace(self, of=Turns(*each, of.chunks, _GROUPS * group, group, of.overlapped))
                for each in ranks
            )
            alike = (
                short
                for short in steps
                if (short._end, short._order) == (self._end, self._order)
                and not (short._end and short.of.ranks > group)
                and 3 * len(short.of) <= 2 * least
            )
            of_groups += islice(alike, 1)
        yield from sorted(of_groups, key=lambda short: short._touching != self._touching)

    def _shorter_of_one_chunk(self) -> Iterator[Self]:
        count, ahead = len(self.of), self.ahead
        both, tail = count - ahead, max(0, 2 * ahead - count)
        # a rank that is 0 or 1 forwards ahead has no first forwards that differ from its other forwards
        short = ahead if ahead < _NEAR else _FEWEST
        if both > ahead + _NEAR and self.counts:
            micro_batches = SHORT
        elif both > ahead + _NEAR:  # warm-ups, two steady turns that are alike, and a last one
            short = min(ahead, _NEAR + 1)
            micro_batches = 2 * short + _NEAR + 1 + (not short)  # a step's first turn is like no other
        elif both > ahead:
            micro_batches = count - 2 * (ahead - short)
        else:
            both = min(both, _FEWEST)
            short = both + min(tail, _FEWEST - bool(both))
            micro_batches = both + short
        if micro_batches < count:
            yield replace(self, of=Turns(0, short + 1, 1, micro_batches))

    @cached_property
    def actions(self) -> list[Action]:
        """The actions (name, number) of the rank's step that begin a phase, in order."""
        alternating = self.of.alternating(range(self.ahead, len(self.of)))
        every = chain(self.of.warm_up(), alternating, self.of.cool_down())
        several = self.of.chunks > 1
        begin_phases = _PHASES if several else _PHASES[:2]
        first = [_BEGINS] * (self.begins or several)
        return [*first, *(action for action in every if action[0] in begin_phases)]

    @cached_property
    def _places(self) -> dict[Action, int]:
        return {action: place for place, action in enumerate(self.actions)}

    @property
    def steady(self) -> list[tuple[int, int]]:
        """The places of two forwards, and of the two backwards after them, that must do the same work: the
        last two turns of the steady state of a rank with one chunk, if it has two."""
        last, ahead = len(self.of) - 2, self.ahead
        pair = (("forward", 0), ("backward", ahead)) if self.of.chunks == 1 and last > 2 * ahead else ()
        return [(self._places[name, last - 1 - by], self._places[name, last - by]) for name, by in pair]

    @cached_property
    def _latest(self) -> list[tuple[int, int]]:
        """For each place, and for the end, the numbers of the last forward and the last backward so far."""
        forward, backward, latest = -1, -1, []
        for name, number in self.actions:
            forward = number if name == "forward" else forward
            backward = number if name == "backward" else backward
            latest.append((forward, backward))
        return [*latest, (forward, backward)]

    @cached_property
    def _numbers(self) -> tuple[dict[Turn, int], dict[Turn, int]]:
        """The number of each turn among the forwards, and among the backwards."""
        forwards, backwards = (
            {turn: number for number, turn in enumerate(turns)}
            for turns in (self.of.forwards, self.of.backwards)
        )
        return forwards, backwards

    @cached_property
    def _gathers(self) -> dict[int, int]:
        """By chunk, the number of the forward that begins to gather the chunk's weights."""
        gathered = ((self.of.gathered(number), number) for number in range(len(self.of)))
        return {chunk: number for chunk, number in gathered if chunk is not None}

    def __len__(self) -> int:
        return len(self.actions)

    def phases(self, place: int) -> list[str]:
        """The names of the phases that the action at a place begins."""
        name, number = action = self.actions[place]
        if action == _BEGINS:
            return ["forward"] * (self.begins + (self.of.chunks > 1))
        if name == "forward" and self.of.gathered(number) is not None:
            return ["forward", "forward"]
        return ["backward" if name in _BACKWARD else "forward"]

    def _turn(self, action: Action) -> Turn:
        name, number = action
        return (self.of.forwards if name in _FORWARD else self.of.backwards)[number]

    def _stretch(self, name: str, number: int) -> tuple[int, int]:
        """(the number of the stretch of a step in which an action of the only chunk is, the turns since the
        stretch began). A turn is a forward with the backward after it, or one of the two. The stretches: 0
        warm-up forwards, 1 forwards with the warm-up's backwards, 2 the alternating rest, 3 the last forward,
        4 the warm-up's backwards after it, 5 other backwards, 6 the last backward."""
        ahead, count = self.ahead, len(self.of)
        turn, end = number + ahead * (name == "backward"), count + ahead - 1
        starts = (0, ahead, 2 * ahead, max(ahead, count - 1), count, max(count, 2 * ahead), end)
        stretch = max(number for number, start in enumerate(starts) if start <= turn)
        return stretch, turn - starts[stretch]

    def _kind(self, action: Action) -> Hashable:
        """A key that an action shares with every action of which it may be a copy."""
        (name, number), of = action, self.of
        if number < 0:
            return action, of.received(*action) if name != "begins" else None
        if of.chunks == 1:
            return name, self._stretch(*action)[0]
        chunk, micro_batch = self._turn(action)
        outside = name in _FORWARD and number < self.ahead
        ends = micro_batch == 0, name in _BACKWARD and micro_batch == of.micro_batches - 1
        received = of.received(name, number) if name in ("pass_on", "pass_back") else None
        by = None if received is None else received - number
        return name, chunk, outside, ends, by, of.gathered(number) if name == "forward" else None

    def _where(self, action: Action) -> tuple[Hashable, ...]:
        """The features in which an action should agree with its copy, the most important feature first."""
        if action[1] < 0:
            return ()
        of, micro_batch = self.of, self._turn(action).micro_batch
        if of.chunks == 1:
            stretch, since = self._stretch(*action)
            # prefer the latest like turn: in earlier turns, tensors of the first turns may still be freed
            return tuple(since > turns for turns in range(SHORT if stretch == _ALTERNATES else _NEAR))
        place, outside = micro_batch % of.group, action[1] >= len(of) - self.ahead
        last = micro_batch == of.micro_batches - 1
        in_group = last, place == 0, place == of.group - 1
        ends = micro_batch < of.group, micro_batch >= of.micro_batches - of.group
        return *in_group, outside, min(micro_batch, _NEAR), *ends

    @cached_property
    def _of_kind(self) -> dict[Hashable, list[tuple[tuple[Hashable, ...], int]]]:
        """For each :meth:`_kind`, the (:meth:`_where`, place) of its actions."""
        alike = defaultdict(list)
        for place, action in enumerate(self.actions):
            alike[self._kind(action)].append((self._where(action), place))
        return alike

    def like(self, place: int, other: Self) -> int:
        """The place, in the short step ``other``, of the action that is most like this step's at ``place``.

        Raises:
            NotAlike: the short step has no such action.
        """
        if place == len(self):
            return len(other)
        action = self.actions[place]
        where = self._where(action)

        def in_common(like: tuple[tuple[Hashable, ...], int]) -> list[bool]:
            return [a == b for a, b in zip(where, like[0], strict=True)]

        alike = other._of_kind.get(self._kind(action))
        if not alike:
            raise NotAlike(f"no action of the short step is as {action[0]} {action[1]}")
        return max(alike, key=in_common)[1]

    def _near(self, place: int, forwards: bool) -> Iterator[tuple[int | None, int]]:
        """Yield (the number of a forward, or else backward, near the action at ``place``, or None; how many
        numbers before it an action may be to which the one at ``place`` refers)."""
        name, number = self.actions[place]
        own = (name in _FORWARD) == forwards
        turn = self._turn(self.actions[place]) if number >= 0 else None
        numbers = self._numbers[not forwards]
        yield (number if own else None), _NEAR
        # at its micro-batch's forward, which may use what was received before it
        at = self._places["forward", self._numbers[0][turn]] if turn and name in _BACKWARD else None
        yield (None if at is None else self._latest[at][not forwards]), 1
        yield (None if own else self._latest[place][not forwards]), 1
        before = turn._replace(micro_batch=turn.micro_batch - 1) if turn else None
        yield (numbers.get(before) if before else None), 1

    def moved(self, place: int, of: int, other: Self, to: int) -> int:
        """The place in ``other`` to which its action at ``to`` refers, if the like action of this step, at
        ``place``, refers to place ``of``.

        Raises:
            NotAlike: the other step has no such action.
        """
        if of == len(self):
            return len(other)
        action = name, number = self.actions[of]
        if number >= 0:
            action = name, self._moved(place, name, number, other, to)
        if action not in other._places:
            raise NotAlike(f"there is no {action[0]} {action[1]}")
        return other._places[action]

    def _moved(self, place: int, name: str, number: int, other: Self, to: int) -> int:
        forwards = name in _FORWARD
        if place < len(self):
            near = zip(self._near(place, forwards), other._near(to, forwards), strict=True)
            for (mine, most), (theirs, _) in near:
                if mine is not None and theirs is not None and 0 <= mine - number <= most:
                    return theirs + number - mine
        else:  # the end of a step refers to the last actions, and to actions near the last forward
            lasts = [(len(self.of), len(other.of))]
            if not forwards and self.of.chunks == 1:
                lasts.append((len(self.of) - self.ahead, len(other.of) - other.ahead))
            for mine, theirs in lasts:
                if abs(number - mine) <= _NEAR:
                    return number - mine + theirs
        chunk = self.of.gathered(number) if name == "forward" else None
        if chunk in other._gathers:
            return other._gathers[chunk]
        turn = self._turn((name, number))
        count, there = self.of.micro_batches, other.of.micro_batches
        last = there - count + turn.micro_batch
        micro_batch = turn.micro_batch if 2 * turn.micro_batch < count else last
        return other._numbers[not forwards][turn._replace(micro_batch=micro_batch)]
