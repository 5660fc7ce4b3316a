"""`spbench reproduce datasheets` and `bands`: the files that they make, and what they refuse."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.tools.papers import reproduction
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.execution import RanScenario
from tests.tools.commands.conftest import Run

RESULTS = Path("results", "reproduction")
#: of a row, what a time rests on
RESTS = {"rates": "datasheet", "bound": "matmul"}


@pytest.fixture
def reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run `spbench reproduce` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    return partial(command_line, "reproduce")


def compared(name: str, quantity: str, source: str) -> Comparison:
    numbers = {"published": 100.0, "reproduced": 80.0, "relative_error": -0.2, "role": "predicted"}
    texts = {"note": "", "variant": "", "numerator": name, "denominator": "", "cell": name}
    statuses = {"table": "t", "status_published": "ok", "status_reproduced": "ok"}
    return Comparison(claim="", quantity=quantity, source=source, **numbers, **texts, **statuses)


def made(asked: list[tuple[Any, ...]]) -> Any:
    """In place of running cells: two comparisons of one row, and what was asked."""

    def run_cells(scenario: Any, narrowing: Narrowing, folder: Path, *rest: Any) -> RanScenario:
        asked.append((scenario.name, narrowing.clusters, folder))
        row = {"key": scenario.name, "status": "ok", "measurement": {"step_time_s": 1.0, **RESTS}}
        found = [
            compared(scenario.name, quantity, f"usp_end_to_end.csv:1:{quantity}")
            for quantity in ("step_time_ms", "memory_gb")
        ]
        return RanScenario([row], [row], found, [])

    return run_cells


def lines_of(path: Path) -> Sequence[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_scenarios_run_on_the_clusters_of_their_names(
    reproduce: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(reproduction, "run_cells", made(asked))
    cluster = RESULTS / "datasheets" / "usp.yaml"
    cluster.parent.mkdir(parents=True)
    cluster.write_text("extends: dgx-a100\n")
    code, _, _ = reproduce("datasheets")
    assert code == 0
    assert asked == [("usp", (cluster.as_posix(),), Path("results", "runs", "datasheets", "usp"))]
    (line,) = lines_of(RESULTS / "datasheets.csv")  # of times alone
    assert (line["quantity"], line["rates"], line["bound"]) == ("step_time_ms", "datasheet", "matmul")
    # which is enough for bands
    assert reproduce("bands")[0] == 0
    interval = json.loads((RESULTS / "bands.json").read_text())["intervals"]["datasheet"]["matmul"]
    assert (interval["sources"], interval["rows"]) == (1, 1)
    assert interval["half_width"] == pytest.approx(0.223144)  # log(0.8)


@pytest.mark.slow
def test_bands_are_written_into_the_package_where_that_is_asked(
    reproduce: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_scenarios_run_on_the_clusters_of_their_names(reproduce, monkeypatch)
    (RESULTS / "bands.json").unlink()
    page, classes, first = RESULTS / "times.md", Path("docs/trust.md"), Path("README.md")
    classes.parent.mkdir()
    for path, *parts in ((page, "times"), (classes, "classes", "left-out"), (first, "left-out")):
        path.write_text(
            "".join(f"a\n<!-- spbench reproduce bands: {part} -->\n<!-- end -->\nb\n" for part in parts)
        )
    assert reproduce("bands", "--write")[0] == 0
    assert json.loads(Path("bench/measure/trust/bands.json").read_text())["strategies"] == [
        "",
        "ring_attention",
        "ulysses",
    ]
    assert not (RESULTS / "bands.json").exists()
    assert "| datasheet | USP's authors with Megatron-LM | 1 | 20.0% |" in page.read_text()
    assert "| datasheet | datasheets alone | 1 (1) | 20.0% |" in classes.read_text()
