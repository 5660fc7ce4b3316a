"""Claims: values computed from some cells' quantities, such as a ratio, with or without a published number;
published formulas in shape letters, evaluated at the sizes of a cell and compared with metered bytes; and
loss curves, the distance of a training run's losses from another run's at the same steps::

values:
  - claim: rsa-max-batch-base
    published: {file: rsa_claims.csv}           # the row that has the claim's name
    cells:                                      # by a name, which the expression may hold
      numerator: {strategy: ring_self_attention, world: 64}
      denominator: {strategy: tensor_parallel, world: 12}
    ours: numerator / denominator               # may be left out where there is one cell
    quantity: answer                            # of each cell, a field of a measurement
  - claim: longest
    each: {model: bert-large}                   # a value for each of these cells, the largest first
    cells: {baseline: {model: bert-large, strategy: single}}
    ours: each / baseline
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PositiveFloat

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import Answer, ScenarioResults
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.selector import QUANTITIES, Mistake, Selector, unknown
from spbench.bench.tools.papers.sources import PublishedPlace, evaluate
from spbench.bench.yaml_files import PublishedNumber
from spbench.impls import PRECISIONS, model_preset

_MEASURED = ("ok", "oom")
LETTERS = ("B", "L", "H", "Z", "A", "N")
#: the name, in an expression, of each of several cells in turn
EACH = "each"
Losses = Sequence[Mapping[str, float | None]]
#: the final loss is the mean of this many last steps, because one batch's loss says little
LAST_STEPS = 20


class CurveClaim(Answer):
    """A claim that a cell's training run has the same losses as another cell's, shown by coinciding curves.

    For each loss, two numbers are compared: the largest relative deviation from the reference's over all
    steps, and the final loss, the mean of the last steps. ``bound``: a larger deviation is not rounding.
    """

    name = "curves"

    claim: str
    cell: Selector
    reference: Selector
    bound: PositiveFloat
    note: str = ""

    def sides(self) -> dict[str, Selector]:
        """The selectors of the two cells, by their keys in the scenario's file."""
        return {"cell": self.cell, "reference": self.reference}

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        return [cell for selector in self.sides().values() for cell in selector.select(_learning(declared))]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        for side, selector in self.sides().items():
            for message in selector.unclear(_learning(declared)):
                yield [side], message

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        learning = replace(results, cells=_learning(results.cells))
        sides = {side: learning.measured(selector, "losses") for side, selector in self.sides().items()}
        missing = [f"{side} {run.missing}" for side, run in sides.items() if run.missing]
        ours, theirs = (run.value or [] for run in sides.values())
        if not missing and [at["step"] for at in ours] != [at["step"] for at in theirs]:
            missing = ["the two have other steps"]

        def entry(quantity: str, loss: str, value: float | None, note: str, status: str = "") -> Comparison:
            return Comparison.of(
                f"{self.claim}: {quantity.replace('_', ' ')}, {loss}".rstrip(", "),
                [run.cell for run in sides.values()],
                None,
                value,
                role="curve",
                notes=[self.note, note],
                variant=results.variant,
                quantity=quantity,
                status_reproduced=status,
            )

        if missing:
            yield entry("largest_deviation", "", None, "; ".join(missing))
            return
        for loss in (name for name in theirs[0] if name != "step"):
            gaps = deviations(ours, theirs, loss)
            largest = max(gaps)
            note = f"at step {ours[gaps.index(largest)]['step']}; {gaps[0]:.1e} at step {ours[0]['step']}"
            exceeded = largest > self.bound
            if exceeded:
                note += f"; above its bound {self.bound:g}"
            yield entry("largest_deviation", loss, largest, note, "numerics" if exceeded else "")
            last = min(LAST_STEPS, len(ours))
            note = f"mean of the last {last} steps; reference {final(theirs, loss):.6g}"
            yield entry("final_loss", loss, final(ours, loss), note)


def deviations(ours: Losses, theirs: Losses, loss: str) -> list[float]:
    """The relative deviation |ours - theirs| / |theirs| of a loss at each step."""
    pairs: list[Any] = [(a[loss], b[loss]) for a, b in zip(ours, theirs, strict=True)]
    return [0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in pairs]


def final(losses: Losses, loss: str) -> float:
    """The final loss: the mean over :data:`LAST_STEPS`."""
    last = [value for at in losses[-LAST_STEPS:] if (value := at[loss]) is not None]
    return sum(last) / len(last)


def _learning(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.learning is not None]


# -- values --------------------------------------------------------------------------------------------------


class Value(Answer):
    """The value of an expression on cells' quantities, and the published number that it is compared with.

    Attributes:
        published: the number in the row with the claim's name; None: nothing was published.
        ours: an expression for :func:`evaluate` in the names of the cells; "": the only cell's quantity.
        unit: the unit of the published number, in units of the quantity.
    """

    name = "values"

    claim: str
    published: PublishedPlace | None = None
    cells: dict[str, Selector] = {}
    each: Selector | None = None
    ours: str = ""
    quantity: str = "answer"
    unit: PositiveFloat = 1.0
    note: str = ""

    @property
    def expression(self) -> str:
        """``ours``, or the name of the only cell."""
        return self.ours or next(iter(self.cells), EACH)

    @property
    def names(self) -> list[str]:
        """The names of cells in the expression, in the order of the expression."""
        return list(dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*", self.expression)))

    @property
    def is_ratio(self) -> bool:
        """Whether the expression is the ratio of two cells' quantities."""
        return self.expression.replace(" ", "") == "/".join(self.names) and len(self.names) == 2

    def numbers(self, folder: Path) -> list[PublishedNumber]:
        quantity = "ratio" if self.is_ratio else self.quantity
        return [self.published.number(self.claim, quantity, folder)] if self.published else []

    def selected(self, declared: Sequence[Cell]) -> list[Cell]:
        selectors = [*self.cells.values(), *([self.each] if self.each else [])]
        return [cell for selector in selectors for cell in selector.select(declared)]

    def check(self, declared: Sequence[Cell], folder: Path) -> Iterator[Mistake]:
        yield from unknown(["quantity"], "unknown quantity", self.quantity, QUANTITIES)
        for name, selector in self.cells.items():
            for message in selector.unclear(declared):
                yield ["cells", name], message
        if self.each is not None and not self.each.select(declared):
            yield [EACH], f"no group declares a cell with {self.each}"
        names = [*self.cells, *([EACH] if self.each else [])]
        if not self.names:
            yield ["ours"], f"{self.ours!r} has no name of a cell"
        try:  # differences of these values are not zero, so dividing by them works
            evaluate(self.expression, {name: 2.5**at for at, name in enumerate(names)})
        except UserError as error:
            yield ["ours"], str(error)
        try:
            self.numbers(folder)
        except UserError as error:
            yield ["published"], str(error)

    def compare(self, results: ScenarioResults) -> Iterator[Comparison]:
        cells = self.each.select(results.cells) if self.each else [None]
        values = [self._compared(cell, results) for cell in cells]
        yield from sorted(values, key=lambda value: (value.reproduced is None, -(value.reproduced or 0.0)))

    def _compared(self, each: Cell | None, results: ScenarioResults) -> Comparison:
        label = self.claim
        if each:
            count = each.training.micro_batches
            label += f": {each.strategy} {each.mesh_text}" + f", {count} micro-batches" * (count > 1)
        ours = {
            name: results.measured_at(each, self.quantity)
            if name == EACH and each
            else results.measured(self.cells[name], self.quantity)
            for name in self.names
        }
        missing = [
            our.missing if name == EACH else f"{name if len(ours) > 1 else 'cell'} {our.missing}"
            for name, our in ours.items()
            if our.missing
        ]
        value = None
        if not missing:
            try:
                value = evaluate(self.expression, {name: our.value for name, our in ours.items()}) / self.unit
            except UserError as error:
                missing = [str(error)]
        cells = [our.cell for our in ours.values()]
        search = cells[0].search if cells[0] else None
        quantity = f"max_{search.quantity}" if search and self.quantity == "answer" else self.quantity
        number = next(iter(self.numbers(results.folder)), None)
        compared = [cell for cell in cells if cell]
        role = results.role(self.claim, number, self.quantity, compared) if number else "predicted"
        return Comparison.of(
            label,
            cells if self.is_ratio else cells[:1],
            number.value if number else None,
            value,
            role=role,
            notes=[self.note, *missing],
            variant=results.variant,
            quantity="ratio" if self.is_ratio else quantity,
            source=number.source if number else "",
        )


# -- formulas ------------------------------------------------------------------------------------------------


class FormulaClaim(Answer):
    """A published formula of the elements that a GPU sends for one layer, compared with the metered elements
    of every cell that ``cells`` selects.

    Attributes:
        published: the place of the formula, whose form :func:`evaluate` describes.
        cells: selects any number of cells, none of which searches for a size.
        less: model options; the elements of the same cell with these options are subtracted, so that those of
            one layer are left.
        phases: the phases of the step whose elements count.
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
            rows = {c.key: results.rows.get(c.key) for c in (cell, other)}
            measured = {key: row for key, row in rows.items() if row and row["status"] in _MEASURED}
            metered, note = None, f"no measurement of {' and '.join(k for k in rows if k not in measured)}"
            if len(measured) == len(rows):
                width = PRECISIONS[cell.precision].parameters.itemsize
                whole, rest = (sent_bytes(measured[c.key], phases=self.phases) for c in (cell, other))
                metered, note = whole / width - rest / width, ""
            more = {"notes": [note], "source": self.published.source(self.claim)}
            expected = evaluate(formula, letters(cell))
            yield _of_cell(cell, self.claim, "sent_elements", expected, metered, **more)

    @classmethod
    def compare_all(cls, entries: Sequence[Self], results: ScenarioResults) -> Iterator[Comparison]:
        """The comparisons of each formula with its cells; then, if there is any formula, of each cell's own
        closed form with its metered bytes."""
        for entry in entries:
            yield from entry.compare(results)
        for cell in results.cells if entries else ():
            row = results.rows.get(cell.key)
            if row is not None and row["status"] in _MEASURED:
                expected, metered = sent_bytes(row, "formula"), sent_bytes(row)
                claim = f"closed form of {cell.strategy}, bytes"
                yield _of_cell(cell, claim, "sent_bytes", expected, metered)


def _of_cell(
    cell: Cell, claim: str, quantity: str, expected: float, metered: float | None, **more: Any
) -> Comparison:
    label = f"{claim}, {cell.sizes.world} GPUs, {cell.engine}"
    named = {"role": "formula", "variant": cell.variant, "quantity": quantity}
    return Comparison.of(label, [cell], expected, metered, **named, **more)


def letters(cell: Cell) -> dict[str, float]:
    """The values of the shape letters :data:`LETTERS` at a cell."""
    preset: Any = model_preset(*cell.model_arguments)
    hidden, heads = preset.hidden, preset.heads
    return dict(zip(LETTERS, (*cell.shape, hidden, heads, hidden // heads, cell.sizes.world), strict=True))


def sent_bytes(row: Row, part: str = "communication", phases: Sequence[str] | None = None) -> float:
    """Bytes that one rank sent in some phases, or by default in all: by the meter (``communication``) or by
    the closed form (``formula``)."""
    entries = row["measurement"][part]
    return sum(entry["sent_bytes"] for entry in entries if phases is None or entry["phase"] in phases)
