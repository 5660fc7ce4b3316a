"""A page for each paper: its tables and claims beside ours, what is not met, and the scenarios' own text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from spbench.bench.config.scenario import Scenario
from spbench.bench.published.answers.tables import PublishedTable
from spbench.bench.report.arrangement import point_of, varying
from spbench.bench.report.gathered import Gathered, PaperResults
from spbench.bench.report.loss_charts import loss_chart
from spbench.bench.report.page import Chart, DataTable, Page
from spbench.bench.report.ratio_charts import ratio_chart
from spbench.bench.report.table_charts import table_chart
from spbench.bench.reproduction.findings import Record, by_table, errors_by_role, of_table
from spbench.plots.style import strategy_name

#: fields of measurements as axis titles; others are shown as they are
_FIELDS = {
    "peak_memory_bytes": "peak memory",
    "tokens_per_s": "tokens per second",
    "samples_per_s": "samples per second",
    "step_time_s": "step time (s)",
    "answer": "largest that fits",
}
#: settings that a training run is not named after, beside those that it always is
_UNNAMED = ("model", "method", "gpus", "tokens_per_gpu", "mesh", "dp", "pp")
_UNITS = {2**20: "MiB", 2**30: "GiB", 10**6: "MB", 10**9: "GB"}


@dataclass(frozen=True)
class ScenarioPart:
    """What the page shows of a scenario.

    Attributes:
        run: its line of PAPER_runs.csv; None if it was not run.
        errors: of all its numbers by role.
        inferred: the settings that were chosen by looking at published numbers, and why.
        text: of the scenario's file.
        figure: the path of its static figure on the site; "" if there is none.
    """

    scenario: Scenario
    run: Record | None
    errors: str
    charts: Sequence[Chart]
    inferred: DataTable | None
    text: str
    figure: str


def pages(gathered: Gathered) -> Iterator[Page]:
    """paper-NAME.html for each paper."""
    for number, paper in enumerate(gathered.papers):
        figures: dict[str, str | bytes] = {}
        parts = [_part(gathered, paper, scenario, figures) for scenario in paper.scenarios.values()]
        yield Page(
            f"paper-{paper.paper.name}.html",
            paper.paper.title,
            "paper.html",
            {"paper": paper, "parts": parts, "verdict": _verdict(paper)},
            group="Papers",
            order=10 + number,
            summary=f"{paper.paper.label}, {paper.paper.source}: its tables and claims beside ours.",
            short_title=paper.paper.label,
            files=figures,
        )


def _verdict(paper: PaperResults) -> DataTable | None:
    if paper.findings is None:
        return None
    titles = {name: scenario.document.title for name, scenario in paper.scenarios.items()}
    lines = [
        {
            "table or figure": titles.get(line["scenario"], "all of the paper"),
            **{name: line[name] for name in ("compared", "variant", "numbers", "errors", "statuses right")},
        }
        for line in paper.findings.verdict()
    ]
    # as in REPRODUCE.md, a title once for all of its lines
    for above, line in reversed(list(pairwise(lines))):
        if line["table or figure"] == above["table or figure"]:
            line["table or figure"] = ""
    return DataTable("verdict", "What was compared, how many published numbers, and errors by role", lines)


def _part(
    gathered: Gathered, paper: PaperResults, scenario: Scenario, figures: dict[str, str | bytes]
) -> ScenarioPart:
    found = paper.findings
    run = next((run for run in found.runs if run["scenario"] == scenario.name), None) if found else None
    records = [r for r in found.records if r["scenario"] == scenario.name] if found else []
    return ScenarioPart(
        scenario,
        run,
        errors_by_role(records) if records else "",
        list(_charts(gathered, scenario, records)),
        _inferred(scenario),
        scenario.path.read_text(encoding="utf-8"),
        _figure(gathered.results, scenario, figures),
    )


def _charts(gathered: Gathered, scenario: Scenario, records: Sequence[Record]) -> Iterator[Chart]:
    """The charts of a scenario: claims, tables, formulas and curves."""
    claims = [r for r in records if not of_table(r) and r["role"] not in ("formula", "curve")]
    if claims:
        yield ratio_chart(f"{scenario.name}-claims", "Claims", claims)
    cells = _cells_of(gathered)
    tables = {table.table: table for table in scenario.answers(PublishedTable)}
    for (name, quantity, variant), some in by_table(records).items():
        lines = [record for record in some if record["cell"] in cells]
        if not lines:
            continue
        column = tables[name].by_name[quantity] if name in tables else None
        unit = _unit(column.field, column.unit, quantity) if column else quantity
        title = name + (f" ({variant})" if variant else "")
        yield table_chart(_identifier(scenario.name, name, quantity, variant), title, unit, lines, cells)
    searched = _searches(gathered, scenario, {r["cell"] for r in records if of_table(r)})
    for quantity, lines in searched.items():
        identifier = _identifier(scenario.name, "largest", quantity)
        unit = f"largest {quantity.replace('_', ' ')}".replace("seq len", "sequence length (tokens)")
        yield table_chart(identifier, "Searches for the largest that fits", unit, lines, cells)
    formulas = [r for r in records if r["role"] == "formula"]
    if formulas:
        yield ratio_chart(f"{scenario.name}-formulas", "Elements sent, closed forms", formulas)
    losses = _losses(gathered, scenario)
    if losses:
        yield loss_chart(f"{scenario.name}-curves", "Training", losses)


def _cells_of(gathered: Gathered) -> Mapping[str, Mapping[str, Any]]:
    """The fields of every known cell, by key."""
    declared = {key: cell.model_dump() for key, cell in gathered.declared.items()}
    return declared | {key: row["cell"] for key, row in gathered.rows.items()}


def _searches(gathered: Gathered, scenario: Scenario, compared: Collection[str]) -> dict[str, list[Record]]:
    """The answers of the scenario's searches by quantity, as records without published numbers.

    Args:
        compared: the keys of cells that a published table has, which are left out.
    """
    found: dict[str, list[Record]] = {}
    for cell in gathered.cells:
        row, search = cell.row, cell.row["cell"].get("search")
        if cell.scenario == scenario.name and search and row["key"] not in compared:
            record = {
                "table": "",
                "quantity": search["quantity"],
                "source": "",
                "cell": row["key"],
                "published": None,
                "reproduced": row["measurement"].get("answer"),
                "relative_error": None,
                "status_published": "",
                "status_reproduced": row["status"],
                "role": "",
                "note": row["reason"],
            }
            found.setdefault(search["quantity"], []).append(record)
    return found


def _losses(gathered: Gathered, scenario: Scenario) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The losses of the scenario's training runs by a name of each."""
    rows = [cell.row for cell in gathered.cells if cell.scenario == scenario.name]
    trained = [row for row in rows if row["measurement"].get("losses")]
    points = [point_of(row["cell"]) for row in trained]
    names = [name for name in varying(points) if name not in _UNNAMED]
    found = {}
    for row, point in zip(trained, points, strict=True):
        settings = [
            f"{name.replace('_', ' ')} {point[name]}" for name in names if point.get(name) is not None
        ]
        texts = (point["model"], strategy_name(point["method"]), f"{point['gpus']} ranks", *settings)
        found[", ".join(texts)] = row["measurement"]["losses"]
    return found


def _unit(field: str, unit: float, quantity: str) -> str:
    """What an axis says of a quantity."""
    text = _FIELDS.get(field, field.replace("_", " "))
    if field == "answer":
        return f"{quantity.replace('max_', 'largest ').replace('seq_len', 'sequence length')} that fits"
    return f"{text} ({_UNITS[int(unit)]})" if int(unit) in _UNITS else text


def _identifier(*names: str) -> str:
    return "-".join(name.replace("_", "-").replace(" ", "-") for name in names if name)


def _inferred(scenario: Scenario) -> DataTable | None:
    lines = [
        {
            "setting": one.setting,
            "chosen by looking at": ", ".join([*one.answers, *one.quantities]),
            "why": " ".join(one.reason.split()),
        }
        for one in scenario.document.inferred_from
    ]
    caption = "Settings that were chosen by looking at published numbers"
    return DataTable(f"{scenario.name}-inferred".replace("_", "-"), caption, lines) if lines else None


def _of_256_colours(source: Path) -> bytes:
    """A figure as PNG of less than half the size, which looks the same."""
    stream = io.BytesIO()
    with Image.open(source) as figure:
        figure.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    return stream.getvalue()


def _figure(results: Path, scenario: Scenario, figures: dict[str, str | bytes]) -> str:
    """The path of the scenario's static figure on the site, which is added to ``figures``."""
    source = results / "reproduction" / "figures" / f"{scenario.document.figure}.png"
    if scenario.document.figure is None or not source.is_file():
        return ""
    path = f"figures/{source.name}"
    figures[path] = _of_256_colours(source)
    return path
