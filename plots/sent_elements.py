"""What a GPU sends for a layer: lines are metered elements, markers the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from matplotlib.figure import Figure
from pandas import DataFrame, isna

from spbench.plots.along import Along
from spbench.plots.line_panels import line_panels
from spbench.plots.lines import PlottedQuantity, lines_of
from spbench.plots.series import Row, engine, grouped, strategy
from spbench.plots.style import looks

_COLUMN, _EXACT, _BACKWARD = "sent_elements", "-wire", "-backward"
_AS_PAPERS = ("-table1", "-per-layer")
_SAME = 1e-12


def sent_elements_figure(
    rows: Sequence[Row], comparison: DataFrame, along: Along, panel: Callable[[Row], str]
) -> Figure:
    """Metered elements by strategy, in the panels that have several places along the x axis and several
    strategies; panels of one strategy are drawn only if there are no others.

    Args:
        comparison: the table of comparison.csv with the formulas of the rows; may be empty.
        panel: the title of a row's panel.
    """
    exact = exact_formulas(comparison)
    known = [] if exact.empty else exact.to_dict("records")
    metered = {entry["cell"]: float(entry["reproduced"]) for entry in known if not isna(entry["reproduced"])}
    keys = {entry["cell"] for entry in known}
    with_formula = [row for row in rows if row["key"] in keys]
    look = looks(map(strategy, with_formula))
    quantity = PlottedQuantity(
        _COLUMN,
        "Elements sent per GPU\nand layer, forward",
        lambda row: metered.get(row["key"]),  # what is sent is known of runs out of memory too
        logarithmic=True,
    )
    panels = {
        name: list(lines_of(_of_one_engine(some, along), look, along))
        for name, some in grouped(with_formula, panel).items()
        if len(set(map(along.at, some))) > 1
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
    """The rows of a comparison table with formulas of what is sent forward.

    Where a paper counts a method's elements otherwise, the table has an exact formula too, which replaces the
    paper's.
    """
    if comparison.empty:
        return comparison
    formulas = comparison[comparison["quantity"] == _COLUMN]
    claims = formulas["claim"].str.split(",").str[0]
    own = set(formulas.loc[claims.str.endswith(_EXACT), "strategy"])
    otherwise = claims.str.endswith(_AS_PAPERS) & formulas["strategy"].isin(own)
    return formulas[~(otherwise | claims.str.endswith(_BACKWARD))]


def _of_one_engine(rows: Sequence[Row], along: Along) -> list[Row]:
    """One row for each strategy and place: the virtual engine's where several engines ran it."""
    last = sorted(rows, key=lambda row: engine(row) == "virtual")
    return list({(strategy(row), along.at(row)): row for row in last}.values())


def _agreement(exact: DataFrame) -> Iterator[str]:
    """A sentence for each engine on how many of its metered numbers are those of the formulas."""
    known = [] if exact.empty else exact[exact["reproduced"].notna()].to_dict("records")
    for name in dict.fromkeys(str(entry["claim"]).rsplit(", ", 1)[-1] for entry in known):
        mine = [entry for entry in known if str(entry["claim"]).endswith(f", {name}")]
        same = [entry for entry in mine if abs(entry["relative_error"]) < _SAME]
        yield f"engine {name}: metered as by the formula in {len(same)} of {len(mine)} cells"
