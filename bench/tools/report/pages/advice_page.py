"""The page of saved answers of `spbench advise`: the best layouts for each question, with lower bounds."""

import ast
import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spbench.bench.measure import with_band
from spbench.bench.tools.report.drawings import svg
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import TABLES, DataTable, Figure, Page
from spbench.plots.fit_and_advise import layouts_figure
from spbench.plots.style import backend_name, length_text, model_name, strategy_name

#: the folder in results/ with CSV files that `spbench advise --format csv` printed
FOLDER = "advice"
#: the columns of the question, the further columns that a file must have, and the columns of numbers
_COLUMNS = TABLES.forms["columns"]["advice"]


def pages(gathered: Gathered) -> Iterator[Page]:
    """The page advice.html; no page if results/advice has no answers."""
    questions = kept(gathered.results / FOLDER)
    if questions:
        yield Page(
            "advice.html",
            "Advice",
            "advice.md",
            {"answers": [drawing(f"advice-{at}", lines) for at, lines in enumerate(questions)]},
            order=80,
            summary="The fastest layouts that fit, for questions that spbench advise has answered.",
        )


def kept(folder: Path) -> list[list[dict[str, str]]]:
    """The lines (layouts) of each question in all files; a file without the needed columns is left out."""
    questions: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if {*_COLUMNS["question"], *_COLUMNS["needed"]} <= {*(reader.fieldnames or ())}:
                for line in reader:
                    questions.setdefault(tuple(line[name] for name in _COLUMNS["question"]), []).append(line)
    return list(questions.values())


def drawing(name: str, lines: Sequence[Mapping[str, str]]) -> DataTable:
    """The table of a question's layouts, with a picture of their step times; ``name`` names both files."""
    first, layouts = lines[0], [_with_numbers({**line, **_interval(line)}) for line in lines]
    title = (
        f"{model_name(first['model'])} on {first['gpus']} GPUs of {first['cluster']}, "
        f"batch {first['batch']}, sequence length {length_text(int(first['seq_len']))}"
    )
    records = TABLES.records("layout", layouts, strategy_name=strategy_name, backend_name=backend_name)
    ties = [line["layout"] for line in records if line["tie"]]
    tie = f", a tie with {', '.join(ties[1:])}" if len(ties) > 1 else ""
    alt = f"The best is {records[0]['layout']} with {records[0]['step s']:.3g} s{tie}."
    drawn = Figure(f"figures/{name}.svg", svg(layouts_figure("", layouts)), title, alt)
    return DataTable(name, f"{title}: time of a step", records, drawn=drawn)


def _with_numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a file of answers, with texts of numbers as numbers, None for none. The time of the step is
    its one part for :func:`layouts_figure`, as answers lack the parts of a step."""
    numbers = {name: float(line[name]) if line.get(name) else None for name in _COLUMNS["numbers"]}
    return {**line, **numbers, "parts": {"time of a step": numbers["step_time_s"]}}


def _interval(line: Mapping[str, str]) -> dict[str, Any]:
    """The ends in seconds of a step time's interval, computed by this version; None without an interval."""
    measurement: dict[str, Any] = {name: line.get(name) for name in ("rates", "bound")}
    measurement["step_time_s"] = float(line["step_time_s"])
    with suppress(ValueError, SyntaxError):  # the text in the file may be damaged
        measurement["priced_by"] = ast.literal_eval(line.get("priced_by") or "[]")
    with_ends = with_band({"cell": line, "measurement": measurement})["measurement"]
    return {name: with_ends.get(name) for name in ("step_time_low_s", "step_time_high_s")}
