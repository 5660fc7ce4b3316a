"""The generated parts of a reproduction's texts.

`spbench reproduce datasheets` and `bands`: the files that they make, and what they refuse.
"""

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
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.comparison import Comparison, read_comparisons, read_records
from spbench.bench.tools.papers.document import rendered_documents
from spbench.bench.tools.papers.execution import RanScenario
from spbench.bench.tools.papers.paper_findings import PaperFindings
from tests.bench.hosts import files_of_at_most
from tests.tools.commands.conftest import Run
from tests.tools.commands.small_paper import made_by, refuses, spbench

__all__ = ["spbench"]

PAGE = """# Text
by hand, about `<!-- spbench reproduce ... -->` and `<!-- end -->`
<!-- spbench reproduce rsa: verdict -->
<!-- end -->
<!-- spbench reproduce other: verdict -->
of another paper
<!-- end -->
more by hand
"""
ADD = "add <!-- spbench reproduce rsa: {} --> and <!-- end -->"
DETAILS = """# Details
<!-- spbench reproduce rsa: compared -->
<!-- end -->
<!-- spbench reproduce rsa: small -->
old
<!-- end -->
more by hand
"""


def write_documents() -> None:
    Path("REPRODUCE.md").write_text(PAGE)
    Path("results/reproduction").mkdir(parents=True, exist_ok=True)
    Path("results/reproduction/rsa.md").write_text(DETAILS)


def test_the_text_is_what_the_files_give(spbench: Run) -> None:
    write_documents()
    code, out, _ = spbench("reproduce", "rsa", "--write")
    assert (code, "\nREPRODUCE.md\nresults/reproduction/rsa.md\n\n5 cells: 5 ok\n" in out) == (0, True)
    page, details = Path("REPRODUCE.md").read_text(), Path("results/reproduction/rsa.md").read_text()
    for kept in (PAGE[: PAGE.index("<!-- spbench reproduce rsa")], "of another paper\n", "more by hand\n"):
        assert kept in page
    assert "old" not in details
    assert details.endswith("<!-- end -->\nmore by hand\n")
    assert "5 cells (5 ok), 0 s of one core in all.\n" in details
    assert "| tensor_parallel | tp2 b64 Lmax | 1000 | 1024 | +2.4% | predicted |  |\n" in details
    assert "## [RSA, arXiv 2105.13120](results/reproduction/rsa.md): no\n\n3 of 7 numbers met, " in page
    link = "[A small scenario](results/reproduction/rsa.md#small)"
    verdicts = "size: **no**, 2/5, 21.2%, 96.5%; memory: **no**, 1/3, 26.2%, 50.0%"
    assert f"| {link} | {verdicts} | Two ranks: we do not know why. |\n" in page
    claims = "1 predicted, median error 33.3%, worst 33.3%; 1 inferred, median error 96.5%, worst 96.5%"
    assert f"| [A small scenario](#small) | claims | first | 2 | {claims} |  |\n" in details
    memory = "2 predicted, median error 26.2%, worst 50.0%"
    assert f"|  | t1: memory_mb | first | 2 | {memory} | 2 of 3 |\n" in details
    records, runs = (Path("results/reproduction", f"rsa{kind}.csv") for kind in ("", "_runs"))
    found = PaperFindings(
        "rsa", read_comparisons(records), read_records(runs), {"small": load_scenario("small.yaml").document}
    )
    assert [*rendered_documents(found).values()] == [page, details]


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
    page, classes = RESULTS / "times.md", Path("docs/trust.md")
    classes.parent.mkdir()
    for path, *parts in ((page, "times"), (classes, "classes", "left-out")):
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
