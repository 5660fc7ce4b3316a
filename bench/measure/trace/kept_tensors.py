"""Tensors that the steps of a loop append to a list, such as the losses of micro-batches: those of steps that
are written down (:mod:`measure.trace.repeated_steps`) and not run are made beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from spbench.bench.measure.trace.memory import MemoryMeter
from spbench.bench.measure.trace.torch_internals import FakeTensor, fake_like, is_shared


class KeptTensors:
    """What the steps of one key append to a list; see ``kept`` of :func:`keyed_steps`.

    Attributes:
        tensors: the list, which belongs to the loop.
    """

    def __init__(self, tensors: list[Tensor], meter: MemoryMeter):
        self.tensors, self.meter = tensors, meter
        #: the numbers of their storages at the start of the first step and at the end of each; -1: not known
        self._ends = [self._numbers(tensors)]

    def _numbers(self, tensors: Sequence[Tensor]) -> list[int]:
        numbers = [self.meter.number(x.untyped_storage()) for x in tensors]
        return [-1 if number is None else number for number in numbers]

    def end_step(self) -> None:
        """Note what the list holds at the end of a step."""
        self._ends.append(self._numbers(self.tensors))

    @property
    def numbers(self) -> set[int]:
        """The numbers of all that the steps have appended."""
        return set(self._ends[-1][len(self._ends[0]) :])

    def repeats(self, born: int, births: int) -> bool:
        """Whether the last two steps appended the same, each what it made itself, and nothing else refers to
        what was appended before the last step.

        Args:
            born: the number of the first storage that the last step made.
            births: how many it made, as did the step before.
        """
        taken_out = any(after[: len(before)] != before for before, after in pairwise(self._ends))
        if taken_out or -1 in self._ends[-1]:
            return False
        before, last = (after[len(start) :] for start, after in pairwise(self._ends[-3:]))
        earlier = self.tensors[len(self._ends[0]) : len(self._ends[-2])]
        return (
            last == [number + births for number in before]
            and len({*last}) == len(last)
            and all(number >= born for number in last)
            and all(type(x) is FakeTensor and not x.requires_grad for x in self.tensors[-len(last) :] if last)
            and not any(is_shared(x.untyped_storage()) for x in earlier)
        )

    def repeat(self, times: int, births: int) -> None:
        """Append that many times more what the last step did, and number all.

        What the last step appended may also be held elsewhere. It becomes the last of all, as what the last
        step of the loop appends would be; what is made for the steps between comes before it.
        """
        *_, before, after = self._ends
        last = self.tensors[len(before) :]
        for x, number in zip(self.tensors, before, strict=False):
            self.meter.set_number(x.untyped_storage(), number)
        made = []
        for step in range(times):
            for x, number in zip(last, after[len(before) :], strict=True):
                assert isinstance(x, FakeTensor)
                made.append(fake_like(x))
                self.meter.set_number(made[-1].untyped_storage(), number + step * births)
        self.tensors[len(before) : len(before)] = made
