"""Loops whose steps have keys, equal for steps of equal work, so that an observer need not run all steps.

What a rank does at a step of a ring depends on little: whether it is the first or the last step, and on which
side of the rank the block's owner lies. Steps of one key post the same messages and call the same operators
on tensors of the same shapes. So do the micro-batches of a pipeline's steady state. Training needs each step;
a trace (:mod:`measure.trace.repeated_steps`) can run a few steps and derive the others.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from spbench.impls.observed_work import set_to

Key = Callable[[int], Hashable]
#: a function from the number of steps, their keys, whether their backward is within the loop, and the list of
#: tensors that they keep, to the steps that are to be run, in order
StepChoice = Callable[[int, Key, bool, list[Tensor]], Iterator[int]]

_choice: ContextVar[StepChoice | None] = ContextVar("step choice", default=None)


def keyed_steps(
    size: int, key: Key, *, backward_within: bool = False, kept: list[Tensor] | None = None
) -> Iterable[int]:
    """The steps 0 to size - 1 of a loop, in order; inside :func:`choosing_steps` only some of these.

    Args:
        size: the number of steps.
        key: function of a step; steps with equal keys run the same operators and send the same messages.
        backward_within: each step runs the backward of a forward of this step or an earlier one, so that no
            graph of autograd depends on the number of steps that are run.
        kept: a list to which each step may append tensors without gradients, and from which no step removes
            any. After the loop it has the tensors of all steps, also of steps that were not run.
    """
    choice = _choice.get()
    return range(size) if choice is None else choice(size, key, backward_within, [] if kept is None else kept)


def choosing_steps(choice: StepChoice) -> AbstractContextManager[None]:
    """A context in which ``choice`` selects the steps that loops of this thread run. ``choice`` must select
    at least one step of each key, and the steps that it leaves out must not change what is measured."""
    return set_to(_choice, choice)
