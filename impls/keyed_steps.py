"""Loops whose steps say what they depend on, so that an observer need not run all of them.

What a rank does at a step of a ring depends on little: whether it is the first or the last step, and on which
side of the rank the block's owner lies. Steps of one key post the same messages and call the same operators
on tensors of the same shapes. So do the micro-batches of a pipeline's steady state. Training needs each step;
a trace (:mod:`measure.trace.repeated_steps`) can run a few and write the others down.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Key = Callable[[int], Hashable]
#: takes the number of steps, their keys, whether they are backed within the loop and the list of what they
#: keep, and returns the steps that are to be run, in order
StepChoice = Callable[[int, Key, bool, list[Tensor]], Iterator[int]]

_choice: ContextVar[StepChoice | None] = ContextVar("step choice", default=None)


def keyed_steps(
    size: int, key: Key, *, backward_within: bool = False, kept: list[Tensor] | None = None
) -> Iterable[int]:
    """The steps 0 to size - 1 of a loop, in order; all of them, unless :func:`choosing_steps` is in effect.

    Args:
        size: the number of steps.
        key: of a step, all that its operators, their shapes and its messages depend on.
        backward_within: each step runs the backward of what this step or an earlier one computed, so that no
            graph of autograd depends on how many steps are run.
        kept: a list to which each step may append what it made, without gradients, and from which none takes
            anything. After the loop it has the tensors of all steps, also of those that were not run.
    """
    choice = _choice.get()
    return range(size) if choice is None else choice(size, key, backward_within, [] if kept is None else kept)


@contextmanager
def choosing_steps(choice: StepChoice) -> Iterator[None]:
    """Within it, ``choice`` says which steps of the loops of this thread are run. It must run one step of
    each key at least, and what it leaves out must change nothing that is looked at."""
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)
