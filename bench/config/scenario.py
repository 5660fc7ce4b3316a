"""Scenarios: YAML files that declare cells, and which published numbers they answer to.

Each group is a cell whose model, strategy, batch, seq_len, precision, cluster, engine and sizes may be lists;
lists multiply. Nested settings merge deeply: defaults, then the group, then the variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from spbench.bench.cell import Cell, Measurement
from spbench.bench.comparison.formulas import LETTERS, evaluate
from spbench.bench.comparison.published import published_text, published_value
from spbench.bench.comparison.tables import Table, check_tables
from spbench.bench.config.expand import Problem, expand
from spbench.bench.config.files import find_file, read_yaml, validate
from spbench.bench.errors import UserError, suggestion

PACKAGE = "spbench.scenarios"

#: fields of a measurement that are one number
QUANTITIES = (
    *("answer", "peak_memory_bytes", "reserved_memory_bytes"),
    *("step_time_s", "tokens_per_s", "samples_per_s"),
)
assert {f.name for f in fields(Measurement)} >= set(QUANTITIES)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Published(_Strict):
    """Where a published number stands: the row of a CSV file whose ``key`` is the claim's name."""

    file: str
    key: str = "claim"
    column: str = "published"


class Selector(_Strict):
    """Names one cell of a scenario by what is particular to it; what is left out may be anything.

    Of model_options, strategy_options and training, the settings given must be the cell's.
    """

    model: str | None = None
    strategy: str | None = None
    world: PositiveInt | None = None
    batch: PositiveInt | None = None
    seq_len: PositiveInt | None = None
    precision: str | None = None
    model_options: dict[str, Any] = {}
    strategy_options: dict[str, Any] = {}
    training: dict[str, Any] = {}

    def matches(self, cell: Cell) -> bool:
        """Whether the cell is one of those named."""
        for name in ("model", "strategy", "batch", "seq_len", "precision"):
            if (wanted := getattr(self, name)) is not None and wanted != getattr(cell, name):
                return False
        has = cell.model_dump()
        nested = all(
            has[name].get(option, _ABSENT) == value
            for name in ("model_options", "strategy_options", "training")
            for option, value in getattr(self, name).items()
        )
        return nested and self.world in (None, cell.sizes.world)

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.model_dump(exclude_defaults=True).items())


_ABSENT = object()


class Claim(_Strict):
    """A published number and what of ours is set beside it.

    Attributes:
        denominator: if given, the ratio of the two cells' quantities is compared.
        role: "predicted", or "calibrated" where a setting was fitted to this very number.
    """

    claim: str
    published: Published
    numerator: Selector
    denominator: Selector | None = None
    quantity: str = "answer"
    role: Literal["predicted", "calibrated"] = "predicted"
    note: str = ""


class FormulaClaim(_Strict):
    """A published formula of what a GPU sends for one layer, set beside the metered elements of every cell
    that it speaks of.

    Attributes:
        published: where the formula stands; see :func:`evaluate`.
        cells: any number of cells.
        less: model options of the cell, otherwise the same, whose elements are subtracted, so that what
            is left is one layer's.
        phases: of the step.
    """

    claim: str
    published: Published
    cells: Selector
    less: dict[str, Any]
    phases: list[Literal["forward", "backward", "gradient_sync", "optimizer"]]


class CurveClaim(_Strict):
    """That a cell's training run has the losses of another's, which a paper shows by curves that coincide.

    Compared is the largest relative deviation, over all steps, of each loss from the reference's.

    Attributes:
        bound: a larger deviation is not rounding.
    """

    claim: str
    cell: Selector
    reference: Selector
    bound: PositiveFloat
    note: str = ""

    def sides(self) -> dict[str, Selector]:
        """The two cells, by what they are here."""
        return {"cell": self.cell, "reference": self.reference}


class Document(_Strict):
    """A scenario file as it is written.

    Attributes:
        paper: what it reproduces, by its name or source in results/papers/papers.csv.
        figure: a module in plots/.
    """

    title: str
    paper: str = ""
    about: str = ""
    defaults: dict[str, Any] = {}
    groups: list[dict[str, Any]] = Field(min_length=1)
    variants: dict[str, dict[str, Any]] = {}
    claims: list[Claim] = []
    formulas: list[FormulaClaim] = []
    curves: list[CurveClaim] = []
    tables: list[Table] = []
    figure: str | None = None


@dataclass(frozen=True)
class Scenario:
    """A scenario file, checked.

    Attributes:
        cells: the declared cells of each variant; a scenario without variants has one, named "".
    """

    name: str
    path: Path
    document: Document
    cells: Mapping[str, Sequence[Cell]]

    def published(self, claim: Claim) -> float:
        """The published number of a claim, or UserError."""
        at = claim.published
        return published_value(at.file, at.key, claim.claim, at.column, self.path.parent)

    def formula(self, claim: FormulaClaim) -> str:
        """The published formula of a claim, or UserError."""
        at = claim.published
        return published_text(at.file, at.key, claim.claim, at.column, self.path.parent)


def load_scenario(name: str | PathLike[str]) -> Scenario:
    """The packaged scenario of that name, or the one in the YAML file at that path.

    Raises:
        UserError: there is none, or something in it cannot be; names the file, the key and the mend.
    """
    path = find_file(name, PACKAGE, "scenario")
    document = validate(Document, read_yaml(path), str(path))
    if "all" in document.variants:
        raise UserError(f"{path}: variants.all: 'all' stands for every variant; choose another name")
    try:
        cells = {
            variant: expand(document.defaults, document.groups, document.variants, variant)
            for variant in document.variants or [""]
        }
        _check_claims(document, cells)
        check_tables(document.tables, cells, path.parent, QUANTITIES)
    except Problem as problem:
        raise UserError(f"{path}: {problem}") from problem
    scenario = Scenario(path.stem, path, document, cells)
    for number, claim in enumerate(document.claims):
        try:
            scenario.published(claim)
        except UserError as error:
            raise UserError(f"{path}: claims[{number}].published: {error}") from error
    for number, formula in enumerate(document.formulas):
        try:
            evaluate(scenario.formula(formula), dict.fromkeys(LETTERS, 1.0))
        except UserError as error:
            raise UserError(f"{path}: formulas[{number}].published: {error}") from error
    return scenario


def _check_claims(document: Document, cells: Mapping[str, Sequence[Cell]]) -> None:
    names = [claim.claim for claim in document.claims]
    for number, claim in enumerate(document.claims):
        if claim.claim in names[:number]:
            raise Problem(["claims", number, "claim"], f"{claim.claim!r} is there already; leave one out")
        if claim.quantity not in QUANTITIES:
            hint = suggestion(claim.quantity, QUANTITIES)
            raise Problem(["claims", number, "quantity"], f"unknown quantity {claim.quantity!r}{hint}")
        for side in ("numerator", "denominator"):
            if (selector := getattr(claim, side)) is None:
                continue
            for declared in cells.values():
                selected = [cell for cell in declared if selector.matches(cell)]
                _check_selected(["claims", number, side], selector, selected)
    for number, curve in enumerate(document.curves):
        if curve.claim in names + [other.claim for other in document.curves[:number]]:
            raise Problem(["curves", number, "claim"], f"{curve.claim!r} is there already; leave one out")
        for side, selector in curve.sides().items():
            for declared in cells.values():
                selected = [c for c in declared if c.learning is not None and selector.matches(c)]
                _check_selected(["curves", number, side], selector, selected)


def _check_selected(path: list[str | int], selector: Selector, selected: Sequence[Cell]) -> None:
    """A claim needs one cell on each cluster and engine."""
    if not selected:
        raise Problem(path, f"no group declares a cell with {selector}")
    if len({(cell.cluster, cell.engine) for cell in selected}) < len(selected):
        raise Problem(
            path,
            f"selects {len(selected)} cells, such as {selected[0].key} and {selected[1].key}; "
            "add a key that tells them apart",
        )
