"""Published formulas: arithmetic in shape letters, evaluated at the sizes of a cell, beside metered bytes."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.sweep.results import Row
from spbench.bench.tools.papers.answer import Answer, Mistake, ScenarioResults
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.selector import Selector
from spbench.bench.tools.papers.sources import PublishedPlace

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}

_MEASURED = ("ok", "oom")
LETTERS = ("B", "L", "H", "Z", "A", "N")


class FormulaClaim(Answer):
    """A published formula of what a GPU sends for one layer, set beside the metered elements of every cell
    that it speaks of.

    Attributes:
        published: where the formula stands; see :func:`evaluate`.
        cells: any number of cells, none of which searches.
        less: model options of the cell, otherwise the same, whose elements are subtracted, so that what
            is left is one layer's.
        phases: of the step.
    """

    name = "formulas"

    claim: str
    published: PublishedPlace
    cells: Selector
    less: dict[str, Any]
    phases: list[Literal["forward", "backward", "gradient_sync", "optimizer"]]

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return self.cells.select(declared)

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        try:
            formula = self.published.text(self.claim, folder)
            evaluate(formula, dict.fromkeys(LETTERS, 1.0))
        except UserError as error:
            yield ["published"], str(error)
            return
        for cell in self.selected(declared):
            if cell.search is not None:
                yield ["cells"], f"{cell.key} searches, so that the formula has no sizes; leave it out"
                return
            try:
                evaluate(formula, letters(cell))
            except UserError as error:
                yield ["published"], f"at {cell.key}: {error}"

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        formula = self.published.text(self.claim, results.folder)
        for cell in self.selected(results.cells):
            other = cell.model_copy(update={"model_options": {**cell.model_options, **self.less}})
            by_key = ((c.key, results.rows.get(c.key)) for c in (cell, other))
            rows = {key: row for key, row in by_key if row and row["status"] in _MEASURED}
            missing = [c.key for c in (cell, other) if c.key not in rows]
            metered = None
            if not missing:
                whole, rest = (sent_elements(c, rows[c.key], self.phases) for c in (cell, other))
                metered = whole - rest
            note = f"no measurement of {' and '.join(missing)}" if missing else ""
            expected, source = evaluate(formula, letters(cell)), self.published.source(self.claim)
            yield _entry(self.claim, "sent_elements", expected, metered, cell, note, source)

    @classmethod
    def compare_all(cls, entries: Sequence[Self], results: ScenarioResults) -> Iterator[Comparison]:
        """Each formula beside each cell that it speaks of; then, if there is any formula, each cell's own
        closed form beside its metered bytes."""
        for entry in entries:
            yield from entry.compare(results)
        for cell in results.cells if entries else ():
            row = results.rows.get(cell.key)
            if row is not None and row["status"] in _MEASURED:
                expected, metered = sent_bytes(row, "formula"), sent_bytes(row, "communication")
                yield _entry(f"closed form of {cell.strategy}, bytes", "sent_bytes", expected, metered, cell)


def _entry(
    claim: str,
    quantity: str,
    expected: float,
    metered: float | None,
    cell: Cell,
    note: str = "",
    source: str = "",
) -> Comparison:
    return Comparison.of(
        f"{claim}, {cell.sizes.world} GPUs, {cell.engine}",
        [cell],
        expected,
        metered,
        role="formula",
        notes=[note],
        variant=cell.variant,
        quantity=quantity,
        source=source,
    )


def evaluate(formula: str, letters: Mapping[str, float]) -> float:
    """The value of sums, products, quotients and powers of numbers and letters, in floating point; UserError
    if something else stands in the formula, a letter has no value, or the result is no finite number."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=letter) if letter in letters:
                return float(letters[letter])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise UserError(
            f"cannot evaluate {ast.unparse(node)!r} in the formula {formula!r}; "
            f"it may hold numbers, + - * / ** and {', '.join(letters)}"
        )

    try:
        result = value(ast.parse(formula, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"cannot evaluate the formula {formula!r}: {error}") from error
    if isinstance(result, complex) or not math.isfinite(result):
        raise UserError(f"the formula {formula!r} gives {result}; a finite number is needed")
    return result


def letters(cell: Cell) -> dict[str, float]:
    """What LETTERS stand for at a cell."""
    hidden, heads = _hidden_and_heads(*cell.model_arguments)
    return dict(zip(LETTERS, (*cell.shape, hidden, heads, hidden // heads, cell.sizes.world), strict=True))


def _hidden_and_heads(model: str, options: Mapping[str, Any], config: Mapping[str, Any] | None) -> list[int]:
    from spbench.impls.models.model import model_preset

    preset: Any = model_preset(model, options, config)
    return [preset.hidden, preset.heads]


def sent_elements(cell: Cell, row: Row, phases: Sequence[str]) -> float:
    """Elements that one rank sent in these phases, by the meter."""
    from spbench.impls.training.step import PRECISIONS

    width = PRECISIONS[cell.precision].parameters.itemsize
    sent = sum(r["sent_bytes"] for r in row["measurement"]["communication"] if r["phase"] in phases)
    return sent / width


def sent_bytes(row: Row, part: str) -> float:
    """Bytes that one rank sent: by the meter (``communication``) or by the closed form (``formula``)."""
    return sum(r["sent_bytes"] for r in row["measurement"][part])
