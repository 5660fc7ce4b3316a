"""The generated parts of a reproduction's texts.

`spbench reproduce datasheets` and `bands`: the files that they make, and what they refuse.
"""

import csv
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.command_line.scenario_run import RanScenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.tools.papers import reproduction, reproductions
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.comparison import Comparison, as_lines, read_comparisons, read_records
from spbench.bench.tools.papers.document import rendered_documents
from spbench.bench.tools.papers.paper_findings import PaperFindings
from tests.bench.hosts import files_of_at_most
from tests.grid import data
from tests.tools.commands.conftest import Run
from tests.tools.commands.small_paper import made_by, refuses, spbench
from tests.tools.texts import hold

__all__ = ["spbench"]

RESULTS = Path("results", "reproduction")
PAPER_FILES = (RESULTS / "rsa.csv", RESULTS / "rsa_runs.csv")
PAGE = data(__file__)["PAGE"]
ADD = "add <!-- spbench reproduce rsa: {} --> and <!-- end -->"
DETAILS = data(__file__)["DETAILS"]


def write_documents() -> None:
    Path("REPRODUCE.md").write_text(PAGE)
    Path("results/reproduction").mkdir(parents=True, exist_ok=True)
    Path("results/reproduction/rsa.md").write_text(DETAILS)


def test_the_texts_are_what_the_files_give(spbench: Run) -> None:
    """Every published number has a line, and an error for each role: of the two lengths, one decided a
    setting."""
    write_documents()
    code, out, _ = spbench("reproduce", "rsa", "--write")
    records, runs, *documents = paths = [*PAPER_FILES, Path("REPRODUCE.md"), RESULTS / "rsa.md"]
    files = [f"-- {path.name}\n{path.read_text()}" for path in paths]
    hold(Path(__file__).parent / "texts" / "reproduce", "".join([f"exit code {code}\n", out, *files]))
    as_csv, as_json = (spbench("reproduce", "rsa", "--format", form)[1] for form in ("csv", "json"))
    assert as_csv == records.read_text()
    assert as_lines(read_comparisons(records)) == json.loads(as_json)["records"]
    loaded = {"small": load_scenario("small.yaml").document}
    found = PaperFindings("rsa", read_comparisons(records), read_records(runs), loaded)
    assert [*rendered_documents(found).values()] == [path.read_text() for path in documents]


def test_a_number_that_is_compared_several_times_counts_once(spbench: Run) -> None:
    write_documents()
    spbench("reproduce", "rsa", "--write", "--all-variants")
    page = Path("results/reproduction/rsa.md").read_text()
    lines = [line.split(" | ") for line in page.splitlines() if " | claims | " in line or "t1: " in line]
    assert sorted((line[1], line[2], line[3]) for line in lines) == [
        (what, variant, "2")
        for what in ("claims", "t1: length", "t1: memory_mb")
        for variant in ("first", "steady")
    ]
    # of both variants, and of the first only
    whole = "| **all of the page** |  |  | 6 | 4 predicted, "
    assert whole in page
    spbench("reproduce", "rsa", "--write")
    assert whole in Path("results/reproduction/rsa.md").read_text()


def test_documents_are_written_whole_or_not_at_all(spbench: Run) -> None:
    write_documents()
    spbench("reproduce", "rsa")
    Path("REPRODUCE.md").write_text(long := PAGE + "by hand\n" * 2000)
    size = max(path.stat().st_size for path in Path("results").rglob("*") if path.is_file())
    assert size < len(long)
    with files_of_at_most(size + 1000):
        code, _, err = spbench("reproduce", "rsa", "--write")
    assert (code, err.splitlines()[-1]) == (2, "spbench: cannot write REPRODUCE.md: File too large")
    assert Path("REPRODUCE.md").read_text() == long
    assert [path.name for path in Path().glob(".*")] == []


def test_numbers_of_changed_code_are_not_written(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents()
    made_by(monkeypatch, "abc-dirty")
    code, out, err = spbench("reproduce", "rsa", "--write")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "spbench: small: rows come from code that is in no commit (abc-dirty), so that nothing is "
        "written; commit it, and run again with --fresh"
    )
    assert Path("REPRODUCE.md").read_text() == PAGE
    assert not Path("results/reproduction/rsa.csv").exists()
    assert spbench("reproduce", "rsa")[0] == 0  # to look at, it is good enough


@pytest.mark.parametrize(
    ("document", "text", "message"),
    [
        ("REPRODUCE.md", None, "cannot read REPRODUCE.md: No such file or directory"),
        ("results/reproduction/rsa.md", None, "cannot read results/reproduction/rsa.md: No such file"),
        ("results/reproduction/rsa.md", "nothing", "rsa.md has no part for compared, small: add "),
        ("REPRODUCE.md", "nothing", f"REPRODUCE.md has no part for verdict: {ADD.format('verdict')}"),
        (
            "results/reproduction/rsa.md",
            DETAILS.replace("rsa: small", "rsa: smal"),
            "rsa.md: it can have no part 'smal' of rsa; did you mean 'small'?",
        ),
        ("results/reproduction/rsa.md", DETAILS.replace("\n<!-- end -->", ""), "begins that does not end"),
    ],
)
def test_documents_that_cannot_be_written_into(
    spbench: Run, document: str, text: str | None, message: str
) -> None:
    write_documents()
    Path(document).unlink() if text is None else Path(document).write_text(text)
    refuses(spbench, "rsa --write", message)


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
    """In place of running cells: one row, and what was asked."""

    def run_cells(scenario: Any, narrowing: Narrowing, folder: Path, *rest: Any, **watch: Any) -> RanScenario:
        asked.append((scenario.name, narrowing.clusters, folder))
        row = {"key": scenario.name, "status": "ok", "measurement": {"step_time_s": 1.0, **RESTS}}
        return RanScenario([row], [], {scenario.name: row}, folder)

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
    quantities = ("step_time_ms", "memory_gb")
    published = [compared("usp", each, f"usp_end_to_end.csv:1:{each}") for each in quantities]
    monkeypatch.setattr(reproductions, "set_beside", lambda scenario, ran: (published, []))
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
    page, classes = RESULTS / "times.md", Path("docs/trust.md")
    classes.parent.mkdir()
    first = Path("REPRODUCE.md"), "certainty"
    for path, *parts in ((page, "times"), (classes, "classes", "left-out"), first):
        texts = (f"a\n<!-- spbench reproduce bands: {part} -->\n<!-- end -->\nb\n" for part in parts)
        path.write_text("".join(texts))
    assert reproduce("bands", "--write")[0] == 0
    assert json.loads(Path("bench/measure/trust/bands.json").read_text())["strategies"] == [
        "",
        "ring_attention",
        "ulysses",
    ]
    assert not (RESULTS / "bands.json").exists()
    assert "| datasheet | USP's authors with Megatron-LM | 1 | 20.0% |" in page.read_text()
    assert "| datasheet | datasheets alone | 1 (1) | 20.0% |" in classes.read_text()
