"""Rates and limits of cluster files: numbers with their sources."""

from __future__ import annotations

from typing import Generic, TypeVar

from spbench.bench.published_number import InferredSetting
from spbench.bench.yaml_files import StrictModel

Number = TypeVar("Number")


class Sourced(StrictModel, Generic[Number]):
    """A number, where it comes from, and, where it is not simply read there, how it follows from that.

    Attributes:
        substitute: what was measured in the place of what the number stands for, as "an RTX 4090's"; "": the
            number is of the thing itself. Times that rest on it say so
            (:mod:`measure.simulator.substitutes`).
        fitted_on: for a calibrated number, the published cells that it was fitted on.
        inferred_from: for one that was chosen by looking at published numbers, these.
    """

    value: Number | None
    source: str
    note: str = ""
    substitute: str = ""
    fitted_on: list[str] = []
    inferred_from: list[InferredSetting] = []
