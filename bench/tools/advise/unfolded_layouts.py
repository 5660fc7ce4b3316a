"""Layouts of a model with experts that do not fold, to say what folding gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.tools.advise.candidates import Candidate, candidates
from spbench.bench.tools.advise.estimates import Estimates
from spbench.bench.tools.advise.layouts import Refused
from spbench.bench.tools.advise.question import Question


def unfolded_layouts(
    question: Question,
    estimated: tuple[Estimates, Mapping[str, Mapping[str, Any]]],
    best: Sequence[Cell],
    usable: float,
) -> Iterator[Candidate]:
    """The candidates that do not fold, of the strategies and backends of the best layouts.

    Args:
        estimated: estimates, and settings of the model, as of :func:`candidates`.
        usable: bytes of a card.
    """
    # there are figures of the backends that were asked for, so these stay as they are
    own = [name for name in question.only if name not in question.strategies]
    only = [*dict.fromkeys(cell.strategy for cell in best), *own]
    asked = replace(question, only=only, without=())
    backends = {None, *(cell.training.backend for cell in best)}  # None: of an inference
    for each in candidates(asked, *estimated, Refused(), usable, unfolded=True):
        if each.training.get("backend") in backends:
            yield each
