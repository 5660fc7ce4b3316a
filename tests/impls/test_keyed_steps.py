"""Loops whose steps can be chosen among."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from spbench.impls.keyed_steps import Key, choosing_steps, keyed_steps


def ends(size: int, key: Key, backward_within: bool, kept: list[Tensor]) -> Iterator[int]:
    """The steps whose key is not that of the step before."""
    return (step for step in range(size) if step == 0 or key(step) != key(step - 1))


def test_a_choice_holds_within_its_context() -> None:
    def loop() -> list[int]:
        return list(keyed_steps(10, lambda step: step // 4))

    with choosing_steps(ends):
        assert loop() == [0, 4, 8]
        with choosing_steps(lambda size, *_: iter([size - 1])):
            assert loop() == [9]
        assert loop() == [0, 4, 8]
    assert loop() == list(range(10))


def test_a_failure_ends_the_choice_too() -> None:
    with pytest.raises(ZeroDivisionError), choosing_steps(ends):
        raise ZeroDivisionError
    assert list(keyed_steps(3, lambda step: 0)) == [0, 1, 2]
