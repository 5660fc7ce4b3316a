"""What a GPU sends for a layer: lines are metered elements, markers the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from matplotlib.figure import Figure
from pandas import DataFrame, isna

from spbench.plots.along import Along
from spbench.plots.line_panels import Quantity, line_panels, lines_of
from spbench.plots.series import Row
from spbench.plots.style import looks

_COLUMN, _EXACT, _BACKWARD = "sent_elements", "-wire", "-backward"
_AS_PAPERS = ("-table1", "-per-layer")
_SAME = 1e-12


def sent_elements_figure(
    rows: Sequence[Row], comparison: DataFrame, along: Along, panel: Callable[[Row], str]
) -> Figure:
    """The panels that have several places along the x axis, and where there are such, several strategies.

    Args:
        comparison: the table of comparison.csv, whose formulas speak of the rows; may be empty.
        panel: the title of a row's panel.
    """
    exact = exact_formulas(comparison)
    metered = {
        entry["cell"]: float(entry["reproduced"])
        for entry in exact.to_dict("records")
        if not isna(entry["reproduced"])
    }
    keys = set() if exact.empty else set(exact["cell"])
    spoken_of = [row for row in rows if row["key"] in keys]
    look = looks(row["cell"]["strategy"] for row in spoken_of)
    quantity = Quantity(
        _COLUMN,
        "Elements sent per GPU\nand layer, forward",
        lambda row: metered.get(row["key"]),  # what is sent is known of runs out of memory too
        logarithmic=True,
    )
    found: dict[str, list[Row]] = {}
    for row in spoken_of:
        found.setdefault(panel(row), []).append(row)
    panels = {
        name: list(lines_of(_of_one_engine(some, along), look, along))
        for name, some in found.items()
        if len({along.at(row) for row in some}) > 1
    }
    panels = {name: lines for name, lines in panels.items() if len(lines) > 1} or panels
    return line_panels(
        rows,
        panels,
        [quantity],
        exact,
        "Elements sent for a layer",
        along,
        remarks=list(_agreement(exact)),
        theirs="formula",
    )


def exact_formulas(comparison: DataFrame) -> DataFrame:
    """The rows of formulas that state what is sent forward; papers count some methods otherwise, for which
    there is a formula of their own beside it."""
    if comparison.empty:
        return comparison
    formulas = comparison[comparison["quantity"] == _COLUMN]
    claims = formulas["claim"].str.split(",").str[0]
    own = set(formulas.loc[claims.str.endswith(_EXACT), "strategy"])
    otherwise = claims.str.endswith(_AS_PAPERS) & formulas["strategy"].isin(own)
    return formulas[~(otherwise | claims.str.endswith(_BACKWARD))]


def _of_one_engine(rows: Sequence[Row], along: Along) -> list[Row]:
    """Where both engines ran a cell: the row of the virtual one."""
    last = sorted(rows, key=lambda row: row["cell"].get("engine", "virtual") == "virtual")
    return list({(row["cell"]["strategy"], along.at(row)): row for row in last}.values())


def _agreement(exact: DataFrame) -> Iterator[str]:
    """A line on how many of the metered numbers are the formula's, of all sizes and engines."""
    known = [] if exact.empty else exact[exact["reproduced"].notna()].to_dict("records")
    for engine in dict.fromkeys(str(entry["claim"]).rsplit(", ", 1)[-1] for entry in known):
        mine = [entry for entry in known if str(entry["claim"]).endswith(f", {engine}")]
        same = [entry for entry in mine if abs(entry["relative_error"]) < _SAME]
        yield f"engine {engine}: metered as by the formula in {len(same)} of {len(mine)} cells"
