"""Times, bytes, rates and shares of a step for people, with three significant digits: more would say more
than is known."""

from __future__ import annotations

#: larger units of seconds, and how many of the smaller one they are
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

#: below, a digit after the point tells prices apart
_SMALL = 0.1

#: less is what rounding leaves of sums
_NOTHING_S = 1e-12


def three_digits(value: float) -> str:
    """A number with three significant digits and no exponent: 0.00412, 2.31, 44.0, 118000."""
    if value == 0:
        return "0"
    digits = f"{value:.2e}"
    places = max(0, 2 - int(digits.partition("e")[2]))
    return f"{float(digits):.{places}f}"


def shown_time(seconds: float) -> str:
    """A time in the largest unit of which it has one: "44.0 s", "2.31 ms"; below a picosecond it is 0."""
    unit, name = next((each for each in _UNITS if float(f"{seconds:.2e}") >= each[0]), _UNITS[-1])
    return f"{three_digits(seconds / unit)} {name}" if abs(seconds) >= _NOTHING_S else "0 s"


def shown_bytes(nbytes: float) -> str:
    """An amount of memory or of what is sent: "4.61 GiB", "236 KiB"; below a KiB in bytes."""
    unit, name = next((each for each in _BYTES if nbytes >= each[0]), (1, "bytes"))
    if unit == 1:
        return f"{nbytes:,.0f} byte{'' if round(nbytes) == 1 else 's'}"
    return f"{three_digits(nbytes / unit)} {name}"


def shown_share(share: float | None) -> str | None:
    """A part of a whole in percent, without digits after the point; None for none."""
    return None if share is None else f"{share:.0%}"


def shown_price(ratio: float) -> str:
    """How much longer a step takes than another one, by the ratio of the two: "+0.6%", "+30%"."""
    price = round(ratio - 1, 3) + 0.0  # no negative zero
    return f"{price:+.1%}" if abs(price) < _SMALL else f"{price:+.0%}"
