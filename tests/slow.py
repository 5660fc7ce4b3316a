"""Parameters of which the default run tries some and the slow run all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Values of one case of the slow run alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(values: Iterable[Any], *always: Any) -> list[Any]:
    """These values, of which the default run has only those that are named ``always``."""
    return [value if value in always else slow(value) for value in values]


def slow_ones_are_left_out(config: pytest.Config) -> bool:
    """Whether no slow case is asked for, so that none need be built: not by its mark, nor by its name."""
    return config.option.markexpr == "not slow" and not any("::" in arg for arg in config.args)


def leave_out_slow_cases(metafunc: pytest.Metafunc) -> None:
    """Drop the slow cases of a function, but for one if it has no others, before items are made of them: half
    of all, and a second of each process that collects."""
    calls: list[Any] = metafunc._calls
    quick = [call for call in calls if not any(mark.name == "slow" for mark in call.marks)]
    if metafunc.definition.get_closest_marker("slow"):
        quick = []
    metafunc._calls = quick or calls[:1]


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the default run leaves out of tests that say so.

    ``@pytest.mark.one_in(n)``: of the cases of a test each n-th is left; not for planted faults, nor where
    the only parameter is a strategy or a backend. ``@pytest.mark.covering(times)``: so many are left that
    each value of each parameter is in so many, or in as many as there are; of "outer+inner" each strategy at
    its place. Cases that are slow anyway do not count.
    """
    asked = [
        item
        for item in items
        if any(map(item.get_closest_marker, ("one_in", "covering"))) and not item.get_closest_marker("slow")
    ]
    for _, cases in groupby(asked, lambda item: item.nodeid.split("[")[0]):
        some = [*cases]
        for item in {*some} - {*_left(some)}:
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> Iterator[Hashable]:
    for name, value in item.callspec.params.items():  # type: ignore[attr-defined]
        parts = value.split("+") if isinstance(value, str) else [repr(value)]
        yield from ((name, *part) for part in enumerate(parts))


def _left(cases: list[pytest.Item]) -> list[pytest.Item]:
    if every := cases[0].get_closest_marker("one_in"):
        return cases[:: every.args[0]]
    (times,) = cases[0].get_closest_marker("covering").args  # type: ignore[union-attr]
    values = {item: {*_values(item)} for item in cases}
    seen, left, others = Counter[Hashable](), list[pytest.Item](), [*cases]

    def wanted(item: pytest.Item) -> int:
        return sum(seen[value] < times for value in values[item])

    # the one that adds most, the first of several
    while others and wanted(best := max(others, key=wanted)):
        left.append(best)
        others.remove(best)
        seen.update(values[best])
    return left
