"""Where each length runs a program of its own, traces of few layers at the very length say what fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.extrapolate import ShallowNeeds
from tests.measure.engines.cells import cell_of


def needs(part: Callable[[int], float], seen: list[int]) -> ShallowNeeds:
    def noted(size: int) -> float:
        seen.append(size)
        return part(size)

    found = ShallowNeeds(cell_of("single", 1), tracing.trace, 4, 1)
    found.part = noted
    return found


@pytest.mark.parametrize(("low", "most"), [(0, 1.0), (300, 1.0), (300, 0.9)])
@pytest.mark.parametrize(
    ("part", "looks"),
    [
        (lambda n: 0.1 + n / 700, 6),  # a line: 630
        (lambda n: 0.1 + n / 700 + (n % 7) / 1000, 14),  # and a bit more with the last tile
        (lambda n: 0.5 if n <= 512 else 1.1, 16),  # powers of two on a host
    ],
)
def test_the_last_that_fits_is_found_in_few_looks(
    part: Callable[[int], float], looks: int, low: int, most: float
) -> None:
    seen: list[int] = []
    found = needs(part, seen).last_that_fits(low, 2000, most)
    assert part(found) <= most < part(found + 1)
    assert len(seen) <= looks
    assert all(low < n < 2000 for n in seen)


@pytest.mark.parametrize("part", [lambda n: 2.0, lambda n: 0.1])
def test_none_and_all_fit(part: Callable[[int], float]) -> None:
    assert needs(part, []).last_that_fits(3, 40) == (3 if part(1) > 1 else 39)
