"""Parameters of tests of which the default run has some, and the slow run (``-m slow``) has all."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A pytest parameter with the values of a case that only the slow run has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(values: Iterable[Any], *always: Any) -> list[Any]:
    """The parameters for these values; the default run has only the values that are also in ``always``."""
    return [value if value in always else slow(value) for value in values]


def slow_ones_are_left_out(config: pytest.Config) -> bool:
    """Whether the command line asks for no slow case, by mark or by name, so that none must be built."""
    return config.option.markexpr == "not slow" and not any("::" in arg for arg in config.args)


def leave_out_slow_cases(metafunc: pytest.Metafunc) -> None:
    """Drop the slow cases of a function before pytest makes items of them, to save each process a second; a
    function that has only slow cases keeps one."""
    calls: list[Any] = metafunc._calls
    quick = [call for call in calls if not any(mark.name == "slow" for mark in call.marks)]
    if metafunc.definition.get_closest_marker("slow"):
        quick = []
    metafunc._calls = quick or calls[:1]


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases that the default run leaves out of tests with one of two marks.

    ``@pytest.mark.one_in(n)`` keeps each n-th case of a test; it is not for planted faults, nor for tests
    whose only parameter is a strategy or a backend. ``@pytest.mark.covering(times)`` keeps so many cases that
    each value of each parameter is in ``times`` cases, or in all that have the value; in "outer+inner" each
    strategy at its place is a value. Cases that are slow without these marks do not count.
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

    # the case with most values that are still wanted; of several such cases the first
    while others and wanted(best := max(others, key=wanted)):
        left.append(best)
        others.remove(best)
        seen.update(values[best])
    return left
