"""The largest number that fits, where trying a number is dear and a good guess is known."""

from __future__ import annotations

from collections.abc import Callable


def largest_fitting(count: int, fits: Callable[[int], bool], guess: int) -> int:
    """The largest of 1, ..., ``count`` for which ``fits`` is true; 0 if there is none.

    Whatever is below a number that fits must fit too. The guess is tried first, then numbers at distances
    that double from there to where it turns, then the middle of what is left: two numbers where the guess is
    right.
    """
    low, high, step = 0, count + 1, 1  # low fits, high does not
    tried_low = tried_high = False
    at = min(max(guess, 1), count)
    while high - low > 1:
        if fits(at):
            low, tried_low = at, True
        else:
            high, tried_high = at, True
        if tried_low and tried_high:
            at = (low + high) // 2
        else:
            at = min(low + step, count) if tried_low else max(high - step, 1)
            step *= 2
    return low
