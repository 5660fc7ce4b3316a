"""Values of settings: how sizes may be written, their bounds, and the variables of the environment that a
training program reads."""

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
    number = size(value)
    return value if number is None else number


def no_size(text: str) -> str:
    """What is wrong with a text where a size is needed."""
    if size(text) is not None:
        return f"{shown(text)} is a text; leave out its quotes"
    mend = f"write {text.replace(',', '')}" if _WITH_COMMAS.fullmatch(text) else f"write it {WAYS}"
    return f"{shown(text)} is not a whole number; {mend}"


def _sized(value: Any) -> Any:
    """As :func:`with_suffix`, but a text that is no size is refused with the ways to write one."""
    number = with_suffix(value)
    if isinstance(number, str):
        raise ValueError(no_size(number))
    return number


#: samples of a batch, or positions of a sequence
Count = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_POSITIONS)]
Ranks = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_RANKS)]
#: parts of a step, or steps, which are gone through one after another
Repeats = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_STEPS)]
#: a limit of time
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


#: by the option of training
VARIABLES = {"cublas_workspace": "CUBLAS_WORKSPACE_CONFIG", "cuda_alloc_conf": "PYTORCH_CUDA_ALLOC_CONF"}
EXPANDABLE_SEGMENTS = "expandable_segments:True"
MAX_SPLIT_SIZE = r"max_split_size_mb:\d+"
#: which torch refuses, MiB: its large segment
LEAST_SPLIT_SIZE = 20


def checked(option: str, value: str | None) -> str | None:
    """A variable's value; None for torch's default, so that a cell has one key.

    Raises:
        ValueError: torch would not read it, or it is not modelled.
    """
    if value is None:
        return None
    if option == "cublas_workspace":
        if not re.fullmatch(r"(:\d+:\d+)+", value):
            raise ValueError(f'{value!r} is no CUBLAS_WORKSPACE_CONFIG: write pairs :KIB:COUNT, as ":4096:8"')
        return value
    if value == "expandable_segments:False":
        return None
    if value == EXPANDABLE_SEGMENTS:
        return value
    if not re.fullmatch(MAX_SPLIT_SIZE, value):
        raise ValueError(
            f"of PYTORCH_CUDA_ALLOC_CONF {EXPANDABLE_SEGMENTS} and max_split_size_mb:N are modelled, not "
            f"{value!r}; leave the rest out"
        )
    if max_split_size_mb(value) <= LEAST_SPLIT_SIZE:
        raise ValueError(f"torch has max_split_size_mb of more than {LEAST_SPLIT_SIZE}, not {value!r}")
    return value


def max_split_size_mb(value: str) -> int:
    """N of "max_split_size_mb:N"."""
    return int(value.rpartition(":")[2])
