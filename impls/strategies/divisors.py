"""Which numbers of ranks divide what is to be split."""

from __future__ import annotations


def nearest_divisors(total: int, size: int) -> str:
    """The divisors of ``total`` next below and next above ``size``, which is none of them: "4 or 6"."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below, above = [n for n in divisors if n < size], [n for n in divisors if n > size]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))
