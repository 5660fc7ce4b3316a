"""Throughput by sequence length of each method: LASP (arXiv 2404.02882), speed figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from plots.lengths import Line, Quantity, lengths_figure
from plots.lines import measured
from plots.series import Row, by_model
from plots.style import Look, house_style, looks, save, strategy_name

_THROUGHPUT = Quantity(
    "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True
)

#: how a baseline computes linear attention -> its name; LASP has but one way
_WAYS = {"left_product": "left product", "chunked": "right product"}
_DASHES = ("--", ":", "-.")
_ONE_WAY = ("lasp", "lasp2")


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_speed.png and lasp_speed.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of several lengths and strategies.
        comparison: the table of comparison.csv, which has what was published; may be empty.
    """
    with house_style():
        return save(speed_figure(rows, comparison), output, "lasp_speed")


def speed_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model, a line for each strategy and reading of the baselines."""
    look = looks(row["cell"]["strategy"] for row in rows)
    panels = {model: list(_lines(some, look)) for model, some in by_model(rows).items()}
    return lengths_figure(rows, panels, [_THROUGHPUT], comparison, "Throughput by sequence length")


def _lines(rows: Sequence[Row], look: dict[str, Look]) -> Iterator[Line]:
    clusters = list(dict.fromkeys(row["cell"]["cluster"] for row in rows))
    for strategy, of_strategy in look.items():
        readings: dict[str, list[Row]] = {}
        for row in rows:
            if row["cell"]["strategy"] == strategy:
                readings.setdefault(_reading(row, clusters[0]), []).append(row)
        for number, (reading, some) in enumerate(readings.items()):
            name = ", ".join(filter(None, (strategy_name(strategy), reading)))
            by_length = tuple(sorted(some, key=lambda row: int(row["cell"]["seq_len"])))
            yield Line(name, of_strategy, by_length, _DASHES[number % len(_DASHES)] if reading else "-")


def _reading(row: Row, cluster: str) -> str:
    """What of a row others of its strategy may have otherwise; nothing for LASP on the first cluster."""
    cell = row["cell"]
    way = str((cell.get("model_options") or {}).get("linear_attention", "chunked"))
    found = [] if cell["strategy"] in _ONE_WAY else [_WAYS.get(way, way)]
    return ", ".join([*found, *([cell["cluster"]] if cell["cluster"] != cluster else [])])
