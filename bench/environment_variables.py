"""The settings of training that a program reads from its environment, and what of them is modelled."""

from __future__ import annotations

import re

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
