"""Which numbers of ranks divide what is to be split."""

from __future__ import annotations

from collections.abc import Sequence


def divisors(total: int) -> list[int]:
    """All divisors, the smallest first."""
    return [n for n in range(1, total + 1) if total % n == 0]


def nearest(sizes: Sequence[int], size: int) -> str:
    """The neighbours of ``size`` in the rising ``sizes``, which do not contain it: "4 or 6"."""
    below, above = [n for n in sizes if n < size], [n for n in sizes if n > size]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def nearest_divisors(total: int, size: int) -> str:
    """The divisors of ``total`` next below and next above ``size``, which is none of them: "4 or 6"."""
    return nearest(divisors(total), size)
