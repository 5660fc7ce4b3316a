"""Inferences: settings that a paper leaves out and that were chosen by looking at its published numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from spbench.bench.published_number import PublishedNumber


class InferredSetting(BaseModel):
    """A setting, and the published numbers that decided it; these numbers are not predictions any more.

    Attributes:
        setting: what was chosen.
        answers: the names of the claims and tables that were looked at.
        quantities: of these, the quantities; empty: all.
        rows: of these, the rows, by column and value (any of them); empty: all.
        variants: the scenario's variants that have the setting; empty: all.
        reason: one line: why this value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    setting: str
    answers: list[str] = Field(min_length=1)
    quantities: list[str] = []
    rows: list[dict[str, str | int | float | bool]] = []
    variants: list[str] = []
    reason: str

    def covers(self, answer: str, number: PublishedNumber, variant: str) -> bool:
        """Whether this number of this answer was looked at to choose the setting that the variant has."""
        return (
            answer in self.answers
            and (not self.quantities or number.quantity in self.quantities)
            and (not self.rows or any(number.has(row) for row in self.rows))
            and (not self.variants or variant in self.variants)
        )
