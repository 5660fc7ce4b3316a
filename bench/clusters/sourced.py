"""Figures of cluster files: numbers with their sources."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from spbench.bench.inferred import InferredSetting

Number = TypeVar("Number")


class StrictModel(BaseModel):
    """A part of a file: unknown keys are refused, and nothing can be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(StrictModel, Generic[Number]):
    """A number, where it comes from, and, where it is not simply read there, how it follows from that.

    Attributes:
        fitted_on: for a calibrated figure, the published cells that it was fitted on.
        inferred_from: for one that was chosen by looking at published numbers, these.
    """

    value: Number | None
    source: str
    note: str = ""
    fitted_on: list[str] = []
    inferred_from: list[InferredSetting] = []
