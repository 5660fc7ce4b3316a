"""The data that a GPU sends for a layer, over lengths or GPUs: elements and formulas, or bytes and times."""

from collections.abc import Callable, Iterator, Sequence

from pandas import DataFrame, isna

from spbench.plots.axes import LENGTHS, Along
from spbench.plots.communication import sent_bytes
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_of, measured
from spbench.plots.series import Row, by_model, engine, gpus, grouped, strategy
from spbench.plots.style import engine_name

_COLUMN, _EXACT, _BACKWARD = "sent_elements", "-wire", "-backward"
_AS_PAPERS = ("-table1", "-per-layer")
_SAME = 1e-12


def sent_elements(
    rows: Sequence[Row], comparison: DataFrame, along: Along, facet: Callable[[Row], str]
) -> PanelGrid:
    """Panels of metered elements, with a line for each strategy. Panels with one place along the x axis are
    left out; panels of one strategy are drawn only if there are no others.

    Args:
        comparison: the table of comparison.csv with the formulas of the rows; may be empty.
        facet: a function from a row to the title of its panel.
    """
    exact = exact_formulas(comparison)
    entries = [] if exact.empty else exact.to_dict("records")
    metered = {
        entry["cell"]: float(entry["reproduced"]) for entry in entries if not isna(entry["reproduced"])
    }
    keys = {entry["cell"] for entry in entries}
    quantity = PlottedQuantity(
        _COLUMN,
        "Elements sent per GPU\nand layer, forward",
        lambda row: metered.get(row["key"]),  # known for runs out of memory too
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
    """The rows of a comparison table with formulas of the elements sent in the forward pass. Where a paper
    counts a method's elements in another way, only the table's exact formula is kept."""
    if comparison.empty:
        return comparison
    formulas = comparison[comparison["quantity"] == _COLUMN]
    claims = formulas["claim"].str.split(",").str[0]
    own = set(formulas.loc[claims.str.endswith(_EXACT), "strategy"])
    otherwise = claims.str.endswith(_AS_PAPERS) & formulas["strategy"].isin(own)
    return formulas[~(otherwise | claims.str.endswith(_BACKWARD))]


def _of_one_engine(rows: Sequence[Row], along: Along) -> list[Row]:
    """One row for each strategy and place: the virtual engine's if several engines ran the cell."""
    last = sorted(rows, key=lambda row: engine(row) == "virtual")
    return list({(strategy(row), along.at(row)): row for row in last}.values())


def _agreement(exact: DataFrame) -> Iterator[str]:
    """A note for each engine: how many of its metered numbers equal the formulas."""
    measured_entries = [] if exact.empty else exact[exact["reproduced"].notna()].to_dict("records")
    for name in dict.fromkeys(str(entry["claim"]).rsplit(", ", 1)[-1] for entry in measured_entries):
        mine = [entry for entry in measured_entries if str(entry["claim"]).endswith(f", {name}")]
        same = [entry for entry in mine if abs(entry["relative_error"]) < _SAME]
        yield f"{len(same)} of {len(mine)} cells on {engine_name(name)} send exactly what the formula says"


# -- layers of a recurrence ------------------------------------------------------------------------------


def _of_layers(row: Row) -> float | None:
    """The MiB that a rank sends in forward and backward, without the synchronization of weight gradients,
    which does not depend on the sequence; None if not known."""
    sent = [sent_bytes(row, "communication", phase) for phase in ("forward", "backward")]
    amounts = [nbytes for nbytes in sent if nbytes is not None]
    return sum(amounts) / 2**20 if len(amounts) == len(sent) else None


_SENT = PlottedQuantity("sent_mib", "Sent per GPU\nand layer (MiB)", _of_layers, logarithmic=True)
_TIME = PlottedQuantity("step_ms", "Step of a layer (ms)", measured("step_time_s", 1e-3), logarithmic=True)


def _states_or_heads(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each model (of one layer) and number of GPUs, with a line for each strategy."""
    facets = {
        f"{name}, {count} GPUs": lines_of(of_count, LENGTHS)
        for name, some in by_model(rows).items()
        for count, of_count in sorted(grouped(some, gpus).items())
    }
    return line_grid(rows, facets, (_SENT, _TIME), comparison, "What a layer of a recurrence sends")


draw_states_or_heads = Drawing("states_or_heads", _states_or_heads)
"""What a rank sends for a layer of a recurrence, and the layer's step, by sequence length of each method."""
