"""What a GPU sends for a layer: lines are metered elements, markers the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pandas import DataFrame, isna

from spbench.plots.axes import Along
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_of
from spbench.plots.series import Row, engine, grouped, strategy

_COLUMN, _EXACT, _BACKWARD = "sent_elements", "-wire", "-backward"
_AS_PAPERS = ("-table1", "-per-layer")
_SAME = 1e-12


def sent_elements(
    rows: Sequence[Row], comparison: DataFrame, along: Along, facet: Callable[[Row], str]
) -> PanelGrid:
    """Metered elements by strategy, in the panels that have several places along the x axis and several
    strategies; panels of one strategy are drawn only if there are no others.

    Args:
        comparison: the table of comparison.csv with the formulas of the rows; may be empty.
        facet: the title of a row's panel.
    """
    exact = exact_formulas(comparison)
    known = [] if exact.empty else exact.to_dict("records")
    metered = {entry["cell"]: float(entry["reproduced"]) for entry in known if not isna(entry["reproduced"])}
    keys = {entry["cell"] for entry in known}
    quantity = PlottedQuantity(
        _COLUMN,
        "Elements sent per GPU\nand layer, forward",
        lambda row: metered.get(row["key"]),  # what is sent is known of runs out of memory too
        logarithmic=True,
    )
    facets = {
        name: lines_of(_of_one_engine(some, along), along)
        for name, some in grouped((row for row in rows if row["key"] in keys), facet).items()
        if len(set(map(along.at, some))) > 1
    }
    return line_grid(
        rows,
        {name: lines for name, lines in facets.items() if len(lines) > 1} or facets,
        [quantity],
        exact,
        "Elements sent for a layer",
        along,
        remarks=list(_agreement(exact)),
        theirs="formula",
        one_scale=False,  # tiny models stand beside those of the papers
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
