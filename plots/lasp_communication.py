"""What a GPU sends for a layer of linear attention by sequence length: LASP (arXiv 2404.02882), Table 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame, isna

from plots.lengths import Line, Quantity, lengths_figure
from plots.series import Row, gpus
from plots.style import Look, house_style, looks, save, strategy_name

_COLUMN, _AS_TABLE_1, _EXACT = "sent_elements", "-table1", "-wire"
_SAME = 1e-12


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_communication.png and lasp_communication.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl.
        comparison: the table of comparison.csv, whose formulas speak of the rows; may be empty.
    """
    with house_style():
        return save(communication_figure(rows, comparison), output, "lasp_communication")


def communication_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model and number of GPUs that have several lengths, and where there are such, several
    strategies; lines are metered elements, markers the formulas."""
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
    panels = {
        name: list(_lines(some, look))
        for name, some in _by_size(spoken_of).items()
        if len({row["cell"]["seq_len"] for row in some}) > 1
    }
    panels = {name: lines for name, lines in panels.items() if len(lines) > 1} or panels
    return lengths_figure(
        rows, panels, [quantity], exact, "Elements sent for a layer", list(_agreement(exact)), "formula"
    )


def exact_formulas(comparison: DataFrame) -> DataFrame:
    """The rows of formulas that state what is sent; Table 1 counts some methods otherwise, for which there
    is a formula of their own beside it."""
    if comparison.empty:
        return comparison
    formulas = comparison[comparison["quantity"] == _COLUMN]
    claims = formulas["claim"].str.split(",").str[0]
    own = set(formulas.loc[claims.str.endswith(_EXACT), "strategy"])
    return formulas[~(claims.str.endswith(_AS_TABLE_1) & formulas["strategy"].isin(own))]


def _by_size(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['cell']['model']}, {gpus(row)} GPUs", []).append(row)
    return found


def _lines(rows: Sequence[Row], look: Mapping[str, Look]) -> Iterator[Line]:
    for strategy, of_strategy in look.items():
        # where both engines ran a length: the virtual one, which comes last here
        mine = sorted(rows, key=lambda row: row["cell"].get("engine", "virtual") == "virtual")
        lengths = {int(row["cell"]["seq_len"]): row for row in mine if row["cell"]["strategy"] == strategy}
        if lengths:
            yield Line(strategy_name(strategy), of_strategy, tuple(lengths[n] for n in sorted(lengths)))


def _agreement(exact: DataFrame) -> Iterator[str]:
    """A line on how many of the metered numbers are the formula's, of all sizes and engines."""
    known = [] if exact.empty else exact[exact["reproduced"].notna()].to_dict("records")
    for engine in dict.fromkeys(str(entry["claim"]).rsplit(", ", 1)[-1] for entry in known):
        mine = [entry for entry in known if str(entry["claim"]).endswith(f", {engine}")]
        same = [entry for entry in mine if abs(entry["relative_error"]) < _SAME]
        yield f"engine {engine}: metered as by the formula in {len(same)} of {len(mine)} cells"
