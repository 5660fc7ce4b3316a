"""Published numbers beside ours, as tables: the error stands second, where a phone shows it."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.tools.papers.answer import answers_of
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.paper_findings import Record, by_table, label_of, of_table
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import DataTable
from spbench.plots.axes import length_text
from spbench.plots.series import differing, settings
from spbench.plots.style import strategy_name

Point = Mapping[str, Any]

#: names of settings where readers see them
_NAMES = {"gpus": "GPUs", "seq_len": "length", "dp": "data parallel", "pp": "pipeline stages"}
#: settings that follow from others
_UNSHOWN = ("mesh", "method")
_SPEAKING = ("model", "cluster", "engine", "precision", "variant", "backend")
_LONG = 12

#: head of a table -> column of records, where they are not the same
_COLUMNS = {
    "error": "relative_error",
    "measured": "published",
    "ours": "reproduced",
    "status published": "status_published",
    "status ours": "status_reproduced",
    "of": "quantity",
}
_HEADS = ("error", "published", "ours", "status published", "status ours", "role", "note", "cell")

#: what of a measurement, and its units: the one place where tables and axes have them from
_UNITS: dict[str, dict[float, str]] = {
    "bytes": {1: "bytes", 2**20: "MiB", 2**30: "GiB", 10**6: "MB", 10**9: "GB"},
    "s": {1: "s", 1e-3: "ms"},
}


def quantity_text(field: str, unit: float) -> str:
    """A field of measurements and the unit that it is shown in, such as "step time (ms)"."""
    if field == "answer":
        return "largest that fits"
    if field.endswith("_per_s"):
        scale = {1: "", 1e3: "thousand ", 1e6: "million ", 1e12: "T"}.get(unit, f"{unit:g} ")
        return scale + field.removesuffix("_per_s").replace("_", " ") + " per second"
    name, _, kind = field.rpartition("_")
    if kind not in _UNITS:
        return field.replace("_", " ")
    known = next(
        (text for value, text in _UNITS[kind].items() if math.isclose(value, unit)), f"{unit:g} {kind}"
    )
    return f"{name.replace('_', ' ')} ({known})"


def point_of(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell on one level, hashable, with ``model``, ``method`` and ``gpus``."""
    of_cell = {
        "model": cell["model"],
        "method": cell["strategy"],
        "gpus": math.prod((cell.get("sizes") or {}).values()),
        "seq_len": cell.get("seq_len"),
        "batch": cell.get("batch"),
        **settings({"cell": cell}),
    }
    return {name: value if isinstance(value, Hashable) else str(value) for name, value in of_cell.items()}


def labels(points: Sequence[Point], extra: Sequence[str] = ()) -> list[str]:
    """A text for each point: the method, and every setting in which the points differ."""
    names = [name for name in differing(points) if name not in _UNSHOWN]
    texts = []
    for point, words in zip(points, extra or [""] * len(points), strict=True):
        said = [_setting(name, point[name]) for name in names if point.get(name) is not None]
        texts.append(", ".join(filter(None, [strategy_name(point["method"]), *said, words])))
    return texts


def _setting(name: str, value: Any) -> str:
    words = _NAMES.get(name, name.replace("_", " "))
    if name in _SPEAKING:
        return str(value)
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if name == "gpus":
        return f"{value} {words}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{words} {length_text(int(value)) if name == 'seq_len' else text}"


def tables_of(gathered: Gathered, scenario: Scenario, records: Sequence[Record]) -> Iterator[DataTable]:
    """The tables of a scenario: claims, published tables, searches without a published answer, formulas and
    losses."""
    claims = [r for r in records if not of_table(r) and r["role"] not in ("formula", "curve")]
    if claims:
        yield _claims(f"{scenario.name}-claims", f"Claims: {scenario.document.title}", claims)
    cells = gathered.cell_fields
    tables = {table.table: table for table in answers_of(scenario, PublishedTable)}
    for (name, quantity, variant), some in by_table(records).items():
        lines = [record for record in some if record["cell"] in cells]
        if not lines:
            continue
        column = tables[name].by_name.get(quantity) if name in tables else None
        unit = quantity_text(column.field, column.unit) if column else quantity.replace("_", " ")
        title = name + (f" ({variant})" if variant else "")
        yield _table(_identifier(scenario.name, name, quantity, variant), f"{title}: {unit}", lines, cells)
    searched = _searches(gathered, scenario, {r["cell"] for r in records if of_table(r)})
    for quantity, lines in searched.items():
        title = f"Largest {quantity.replace('seq_len', 'sequence length (tokens)')} that fits"
        yield _table(_identifier(scenario.name, "largest", quantity), title, lines, cells)
    if formulas := [r for r in records if r["role"] == "formula"]:
        title = f"Elements sent, closed forms: {scenario.document.title}"
        yield _claims(f"{scenario.name}-formulas", title, formulas)
    yield from _losses(gathered, scenario)


def _identifier(*names: str) -> str:
    return "-".join(name.replace("_", "-").replace(" ", "-") for name in names if name)


def _table(name: str, title: str, records: Sequence[Record], cells: Mapping[str, Point]) -> DataTable:
    points = [point_of(cells[record["cell"]]) for record in records]
    texts = labels(points, [label_of(record) for record in records])
    lines = [{"what": text, **shown(record, *_HEADS)} for text, record in zip(texts, records, strict=True)]
    return _sorted(name, title, lines)


def _claims(name: str, title: str, records: Sequence[Record]) -> DataTable:
    lines = [
        {"what": ", ".join(filter(None, [r["table"], r["variant"]])), **shown(r, *_HEADS, "of")}
        for r in records
    ]
    return _sorted(_identifier(name), title, lines)


def _sorted(name: str, title: str, lines: Sequence[Mapping[str, Any]]) -> DataTable:
    """The table without columns in which nothing stands."""
    heads = [head for head in lines[0] if any(line[head] not in (None, "") for line in lines)]
    return DataTable(name, title, lines, heads, sortable=len(lines) > _LONG, percent=("error",))


def shown(record: Record, *heads: str) -> dict[str, Any]:
    """What a table has of a record under these heads; :data:`_COLUMNS` says where it stands."""
    return {head: record[_COLUMNS.get(head, head)] for head in heads}


def _searches(gathered: Gathered, scenario: Scenario, compared: Collection[str]) -> dict[str, list[Record]]:
    """The answers of the scenario's searches by quantity, as records without published numbers.

    Args:
        compared: the keys of cells that a published table has, which are left out.
    """
    answers: dict[str, list[Record]] = {}
    for cell in gathered.cells:
        row, search = cell.row, cell.row["cell"].get("search")
        if cell.scenario == scenario.name and search and row["key"] not in compared:
            empty = dict.fromkeys(("table", "status_published", "role", "variant"), "")
            record = {
                **empty,
                "cell": row["key"],
                "published": None,
                "reproduced": row["measurement"].get("answer"),
                "relative_error": None,
                "status_reproduced": row["status"],
                "note": row["reason"],
            }
            answers.setdefault(search["quantity"], []).append(record)
    return answers


def _losses(gathered: Gathered, scenario: Scenario) -> Iterator[DataTable]:
    """The losses of the scenario's training runs, a line a step and a column for each run and loss."""
    rows = [cell.row for cell in gathered.cells if cell.scenario == scenario.name]
    trained = [row for row in rows if row["measurement"].get("losses")]
    by_step: dict[int, dict[str, Any]] = {}
    for name, row in zip(labels([point_of(row["cell"]) for row in trained]), trained, strict=True):
        for step in row["measurement"]["losses"]:
            line = by_step.setdefault(step["step"], {"step": step["step"]})
            line |= {f"{name}: {kind}": value for kind, value in step.items() if kind != "step"}
    if by_step:
        heads = list(dict.fromkeys(head for line in by_step.values() for head in line))
        lines = [{head: line.get(head) for head in heads} for _, line in sorted(by_step.items())]
        yield DataTable(f"{scenario.name}-curves", "Losses by step", lines, heads, sortable=True)
