"""How far predicted memory was from what real machines measured; from the errors in memory_errors.json.

``spbench reproduce bands --write`` writes that file from the committed results of ``spbench reproduce``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median

MEMORY_ERRORS_FILE = "memory_errors.json"
#: the quantities of that file
PEAK, RESERVED = "peak", "reserved"

#: relative errors, ours / measured - 1, by data-parallel backend and quantity
Errors = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class PastErrors:
    """Errors of predictions of one quantity.

    Attributes:
        of: whose they are: a backend, or "all backends".
        rows: how many measured numbers, of which those of one run's ranks count once.
        median, worst: of their absolute values.
        under: how many predictions were below what was measured, by more than rounding (0.01%).
        furthest_under: by how much at the most.
    """

    of: str
    quantity: str
    rows: int
    median: float
    worst: float
    under: int
    furthest_under: float

    def __str__(self) -> str:
        low = f", {self.under} too low by more than 0.01%, at most by {self.furthest_under:.2%}"
        return (
            f"{self.quantity} of {self.rows} measured numbers of {self.of}: median error {self.median:.2%}, "
            f"worst {self.worst:.1%}{low if self.under else ', none too low'}"
        )


@cache
def packaged_errors() -> Errors:
    """Those that this version comes with."""
    content: Errors = json.loads(files(__package__).joinpath(MEMORY_ERRORS_FILE).read_text(encoding="utf-8"))
    return content


def past_errors(backend: str, quantity: str, errors: Errors | None = None) -> PastErrors | None:
    """The errors of a backend; of all where nothing of it was measured; None: nothing at all was.

    Args:
        errors: those of the package if left out.
    """
    known = packaged_errors() if errors is None else errors
    own = known.get(backend, {}).get(quantity, ())
    every = own or [error for each in known.values() for error in each.get(quantity, ())]
    if not every:
        return None
    low = [-error for error in every if error < -1e-4]
    sizes = [abs(error) for error in every]
    of = f"the backend {backend}" if own else f"all backends (none of {backend})"
    return PastErrors(of, quantity, len(every), median(sizes), max(sizes), len(low), max(low, default=0.0))
