"""Every unit, and every form in which numbers are written for people.

Times, bytes, rates and shares have three significant digits, because more digits would be unfounded. The
functions that columns of tables use (:mod:`command_line.record_forms`) return None for None.
"""

import math
import re

from spbench.bench.errors import shown

KIB, MIB, GIB = 2**10, 2**20, 2**30
MS, US = 1e-3, 1e-6

#: the units of time, each in seconds, the largest first
_UNITS = ((1.0, "s"), (MS, "ms"), (US, "us"))

_BYTES = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))

#: smaller relative prices are written with a digit after the point
_SMALL = 0.1

#: the least relative change that is written, because a smaller one would be written as 0%
LEAST_CHANGE = 5e-6

#: seconds below which a time is a rounding error of sums, so that it is written as 0
_NOTHING_S = 1e-12


def three_digits(value: float) -> str:
    """A number with three significant digits and no exponent: 0.00412, 2.31, 44.0, 118000."""
    if value == 0:
        return "0"
    digits = f"{value:.2e}"
    places = max(0, 2 - int(digits.partition("e")[2]))
    return f"{float(digits):.{places}f}"


def six_digits(value: float, separator: str = "") -> str:
    """A number with six significant digits, or a whole number with all digits and ``separator`` between
    thousands: "1.30135", "6,383,206,414"."""
    return f"{value:{separator}.0f}" if float(value).is_integer() else f"{value:.6g}"


def shown_time(seconds: float) -> str:
    """A time in the largest unit that it reaches: "44.0 s", "2.31 ms"; below a picosecond "0 s"."""
    unit, name = next((each for each in _UNITS if float(f"{seconds:.2e}") >= each[0]), _UNITS[-1])
    return f"{three_digits(seconds / unit)} {name}" if abs(seconds) >= _NOTHING_S else "0 s"


def shown_bytes(nbytes: float) -> str:
    """A number of bytes in the largest unit that it reaches: "4.61 GiB", "236 KiB", "12 bytes"."""
    unit, name = next((each for each in _BYTES if nbytes >= each[0]), (1, "bytes"))
    if unit == 1:
        return f"{nbytes:,.0f} byte{'' if round(nbytes) == 1 else 's'}"
    return f"{three_digits(nbytes / unit)} {name}"


def shown_count(count: float) -> str:
    """A number of parameters: "8.03 billion", "151 million", "148,000"."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{three_digits(count / unit)} {name}"
    return f"{count:,.0f}"


def shown_share(share: float | None) -> str | None:
    """A part of a whole in percent, without digits after the point: "8%"; None for None."""
    return None if share is None else f"{share:.0%}"


def shown_price(ratio: float) -> str:
    """The relative difference of two step times, by their ratio: "+0.6%" for 1.006, "+30%" for 1.3."""
    price = round(ratio - 1, 3) + 0.0  # no negative zero
    return f"{price:+.1%}" if abs(price) < _SMALL else f"{price:+.0%}"


def scaled(value: float | None, unit: float) -> str | None:
    """A number in a unit, with two digits after the point, or with two significant digits if it is below a
    tenth of the unit: ``scaled(3 * GIB, GIB)`` is "3.00"."""
    if value is None:
        return None
    return f"{value / unit:.2f}" if abs(value) >= unit / 10 or value == 0 else f"{value / unit:.2g}"


def gib(nbytes: float | None) -> str | None:
    """A number of bytes in GiB, with two digits after the point, without the unit (:func:`scaled`)."""
    return scaled(nbytes, GIB)


_BYTES_OF = {**{name: of for of, name in _BYTES}, "GB": 10**9, "MB": 10**6}
#: the ways to write a number of bytes, for messages
WAYS_OF_BYTES = "as 78GiB, 80GB or 512MiB"


def nbytes_of(text: str) -> int | None:
    """The number of bytes in a text such as 78GiB, 80 GB or 512MiB; None if the text is no such size."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([KMG]i?B)", text.strip())
    if match is None or match[2] not in _BYTES_OF:
        return None
    return int(float(match[1]) * _BYTES_OF[match[2]])


def card_gib(nbytes: float) -> str:
    """A card's bytes in GiB: one digit after the point, two digits below 10, three significant below 1."""
    value = nbytes / GIB
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def mib(nbytes: float | None) -> str | None:
    """A number of bytes in MiB, with two digits after the point, without the unit (:func:`scaled`)."""
    return scaled(nbytes, MIB)


def percent(part: float | None, places: int = 1) -> str | None:
    """A part of a whole in percent: "8.3%"."""
    return None if part is None else f"{part:.{places}%}"


def error_percent(error: float) -> str:
    """A relative error in percent: one digit after the point, or two significant digits below 1%."""
    return f"{error:.1%}" if error >= 0.01 else f"{100 * error:.2g}%"


def difference(error: float | None, places: int = 1) -> str | None:
    """A relative difference in percent, with its sign: "+8.3%"."""
    return None if error is None else f"{error:+.{places}%}"


# -- two values beside each other ------------------------------------------------------------------------


def shown_pair(base: object, new: object, unit: str) -> str:
    """Two values with so many digits that they differ: "115.6 us -> 116.4 us (+0.697%)"; a word is written as
    it is, None as "none".

    Args:
        unit: the unit of the values; "s" and "bytes" are scaled, "%" means parts of a whole.
    """
    numbers = [v for v in (base, new) if isinstance(v, (int, float)) and math.isfinite(v)]
    if len(numbers) < 2:
        return f"{shown_value(base, unit)} -> {shown_value(new, unit)}"
    largest = max(map(abs, numbers))
    scales = {"bytes": _BYTES, "s": _UNITS, "%": ((0.01, "%"),)}.get(unit, ())
    scale, name = next((each for each in scales if largest >= each[0] or unit == "%"), (1.0, unit))
    for digits in range(3, 8):
        texts = [_with_digits(value, scale, digits) for value in numbers]
        if texts[0] != texts[1] or base == new:
            break
    else:
        name, texts = unit, [_with_digits(value, 1.0, 15) for value in numbers]
    pair = " -> ".join(f"{text} {name}".strip().replace(" %", "%") for text in dict.fromkeys(texts))
    if base == new or not numbers[0] or unit == "%":
        return pair
    change = numbers[1] / numbers[0] - 1
    part = f" ({'+' if change > 0 else '-'}{three_digits(abs(change) * 100)}%)"
    return pair + part if abs(change) >= LEAST_CHANGE else pair


def shown_value(value: object, unit: str) -> str:
    """One value as text, in the form of :func:`shown_pair`."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "none" if value is None else str(value)
    return shown_pair(value, value, unit)


def _with_digits(value: float, scale: float, digits: int) -> str:
    """``value`` divided by ``scale``, with at least ``digits`` significant digits, commas between thousands
    and no exponent; a whole number with scale 1 has no digits after the point."""
    if value == 0 or (scale == 1 and float(value).is_integer()):
        return f"{value:,.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value / scale))))
    return f"{value / scale:,.{places}f}"


_CLAIM = re.compile(r"(\d+(?:\.\d+)?) ?(s|ms|%|TFLOP/s|tokens/s)(?:(?<=%) MFU)?")


def claim(text: str) -> tuple[float, str]:
    """(number, unit) of a step's time, or of all tokens or a GPU's FLOPs per second; else ValueError."""
    if (match := _CLAIM.fullmatch(text.strip())) is None or not float(match[1]):
        raise ValueError(f"{shown(text)}: write it as 104.7 s, 38% MFU, 430 TFLOP/s or 25388 tokens/s")
    return float(match[1]), match[2]
