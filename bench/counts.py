"""Sizes in scenario files and options: how they may be written, and their bounds."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from spbench.bench.errors import shown

#: of a suffix of a size, in either case: 128K is 128 * 1024
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(
    r"(?P<number>[-+]?([0-9]{1,18}(_[0-9]+)*(\.[0-9]{1,9})?|\.[0-9]{1,9}))(?P<suffix>[kKmMgG]?)"
)
#: a number with commas, as people write it; on the command line a comma stands between two values
_WITH_COMMAS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
#: the ways to write a size, for messages
WAYS = "as 131072, 131_072, 128K or 0.5M"
#: beyond these no cell is of use, and sums over it would overflow or take all memory
MOST_RANKS, MOST_POSITIONS, MOST_STEPS = 2**17, 2**36, 10**6
#: a limit of time beyond which waiting for it overflows: three years
MOST_SECONDS = 10**8


def size(text: str) -> int | None:
    """The whole number that a word such as 131072, 131_072, 128K or .5M stands for; None if it is none."""
    if not (match := _SIZE.fullmatch(text)):
        return None
    number = Fraction(match["number"].replace("_", "")) * _FACTORS[match["suffix"].upper()]
    return int(number) if number.denominator == 1 else None


def with_suffix(value: Any) -> Any:
    """The number that a text such as 128K stands for, in files, where the text "128" is no number; else the
    value itself."""
    if not isinstance(value, str) or not value.endswith((*"kKmMgG",)):
        return value
    found = size(value)
    return value if found is None else found


def no_size(text: str) -> str:
    """What is wrong with a text where a size is needed."""
    if size(text) is not None:
        return f"{shown(text)} is a text; leave out its quotes"
    mend = f"write {text.replace(',', '')}" if _WITH_COMMAS.fullmatch(text) else f"write it {WAYS}"
    return f"{shown(text)} is not a whole number; {mend}"


def _sized(value: Any) -> Any:
    """As :func:`with_suffix`, but a text that is no size is refused with the ways to write one."""
    found = with_suffix(value)
    if isinstance(found, str):
        raise ValueError(no_size(found))
    return found


#: samples of a batch, or positions of a sequence
Count = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_POSITIONS)]
Ranks = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_RANKS)]
#: parts of a step, or steps, which are gone through one after another
Repeats = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_STEPS)]
#: a limit of time
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
