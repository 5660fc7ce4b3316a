"""Published formulas: arithmetic in shape letters, evaluated at the sizes of a cell, beside metered bytes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.sweep.results import Row
from spbench.impls.models.model import model_preset
from spbench.impls.training.step import PRECISIONS

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


LETTERS = ("B", "L", "H", "Z", "A", "N")


def evaluate(formula: str, letters: Mapping[str, float]) -> float:
    """The value of sums, products, quotients and powers of numbers and letters.

    Raises:
        UserError: something else stands in the formula, or a letter that has no value.
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=letter) if letter in letters:
                return letters[letter]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise UserError(
            f"cannot evaluate {ast.unparse(node)!r} in the formula {formula!r}; "
            f"it may hold numbers, + - * / ** and {', '.join(letters)}"
        )

    try:
        return value(ast.parse(formula, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise UserError(f"cannot evaluate the formula {formula!r}: {error}") from error


def letters(cell: Cell) -> dict[str, float]:
    """What LETTERS stand for at a cell."""
    model: Any = model_preset(cell.model, cell.model_options)
    head_size = model.hidden // model.heads
    return dict(
        zip(LETTERS, (*cell.shape, model.hidden, model.heads, head_size, cell.sizes.world), strict=True)
    )


def sent_elements(cell: Cell, row: Row, phases: Sequence[str]) -> float:
    """Elements that one rank sent in these phases, by the meter."""
    width = PRECISIONS[cell.precision].parameters.itemsize
    sent = sum(r["sent_bytes"] for r in row["measurement"]["communication"] if r["phase"] in phases)
    return sent / width


def sent_bytes(row: Row, part: str) -> float:
    """Bytes that one rank sent: by the meter (``communication``) or by the closed form (``formula``)."""
    return sum(r["sent_bytes"] for r in row["measurement"][part])
