"""Inferences: settings that a paper leaves out and that were chosen by looking at its published numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from spbench.bench.errors import suggestion

if TYPE_CHECKING:
    from spbench.bench.config.answer import Answer, Mistake, PublishedNumber


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


def wrong_inference(
    inference: InferredSetting, answers: Sequence[Answer], variants: Sequence[str], folder: Path
) -> Iterator[Mistake]:
    """What in a scenario's inference names nothing that the scenario has, as (key path, message).

    Args:
        answers: all of the scenario's, checked.
        folder: the scenario file's.
    """
    for index, variant in enumerate(inference.variants):
        if variant not in variants:
            yield ["variants", index], f"unknown variant {variant!r}{suggestion(variant, variants)}"
    known = {answer.entry_name: answer for answer in answers}
    for index, name in enumerate(inference.answers):
        if name not in known:
            yield ["answers", index], f"no answer is called {name!r}{suggestion(name, known)}"
            return
        numbers = known[name].numbers(folder)
        quantities = dict.fromkeys(number.quantity for number in numbers)
        for place, quantity in enumerate(inference.quantities):
            if quantity not in quantities:
                yield ["quantities", place], f"{name} has no {quantity!r}{suggestion(quantity, quantities)}"
        for place, row in enumerate(inference.rows):
            if not any(number.has(row) for number in numbers):
                yield ["rows", place], f"no row of {name} is {row}"
