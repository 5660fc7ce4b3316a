"""Which statuses of cells are better than others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from spbench.bench.cell import Status

#: the better, the earlier
STATUSES: tuple[Status, ...] = ("ok", "oom", "unsupported", "numerics", "mismatch", "timeout", "failed")
assert set(STATUSES) == set(get_args(Status))


def worst_status(statuses: Iterable[Status]) -> Status:
    """The worst of at least one status."""
    return max(statuses, key=STATUSES.index)
