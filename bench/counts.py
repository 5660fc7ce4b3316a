"""Counts in scenario files and options: their suffixes, and their bounds."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

#: of a suffix of a count: 128K is 128 * 1024
_FACTORS = {"K": 2**10, "M": 2**20, "G": 2**30}
#: beyond these no cell is of use, and sums over it would overflow or take all memory
MOST_RANKS, MOST_POSITIONS, MOST_STEPS = 2**17, 2**36, 10**6


def with_suffix(value: Any) -> Any:
    """The whole number that a text such as 128K or 1M stands for; else the value itself."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,12})([KMG])", value)):
        return int(match[1]) * _FACTORS[match[2]]
    return value


#: samples of a batch, or positions of a sequence
Count = Annotated[int, BeforeValidator(with_suffix), Field(gt=0, le=MOST_POSITIONS)]
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]
#: parts of a step, or steps, which are gone through one after another
Repeats = Annotated[int, Field(gt=0, le=MOST_STEPS)]
