"""Reproduction of a paper: its files, what is printed, and the generated parts of a text."""

import csv
import json
import re
from pathlib import Path

import pytest

from spbench.bench.commands.reproduce import RECORDS, RUNS
from spbench.bench.comparison.document import Findings, check_document, markdown, read_records, rendered
from spbench.bench.comparison.papers import papers, scenarios_of
from spbench.bench.config.files import packaged
from spbench.bench.config.scenario import load_scenario
from spbench.bench.errors import UserError
from tests.bench.commands.conftest import Run
from tests.bench.commands.test_cli import sweep_here
from tests.bench.fakes import SCENARIO

ROOT = Path(__file__).parents[3]
TABLE = """
tables:
  - table: t1
    published: {file: t1.csv}
    match: {ranks: world, how: strategy}
    status: status
    quantities:
      memory_mb: {field: peak_memory_bytes, unit: 1048576}
      length: {field: answer}
    calibrated: {length: [{ranks: 8}]}
"""
PUBLISHED = """ranks,how,memory_mb,length,status
2,tensor_parallel,1000,2200,ok
4,ring_self_attention,,,oom
8,ring_self_attention,2048,8000,ok
"""
DOCUMENT = """# Text
by hand, about `<!-- spbench reproduce ... -->` and `<!-- end -->`
<!-- spbench reproduce rsa: summary -->
<!-- end -->
<!-- spbench reproduce rsa: small -->
old
<!-- end -->
<!-- spbench reproduce other: small -->
of another paper
<!-- end -->
more by hand
"""


@pytest.fixture
def spbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run a command line in an empty folder, where small.yaml is the only scenario; its cells are made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spbench.bench.sweep.sweep.sweep", sweep_here)
    monkeypatch.setattr("spbench.bench.comparison.papers.packaged", lambda package: ["small.yaml"])
    Path("small.yaml").write_text(SCENARIO + TABLE)
    Path("t1.csv").write_text(PUBLISHED)
    return command_line


def lines_of(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_published_number_has_a_line(spbench: Run) -> None:
    code, out, _ = spbench("reproduce", "rsa")
    assert code == 0
    found = lines_of("results/reproduction/rsa.csv")
    assert tuple(found[0]) == RECORDS
    assert RECORDS[:10] == (
        *("table", "cell", "strategy", "quantity", "published", "reproduced", "relative_error"),
        *("status_published", "status_reproduced", "role"),
    )
    assert [(r["table"], r["quantity"], r["published"], r["reproduced"]) for r in found] == [
        ("rsa-max-seqlen-base", "ratio", "3.0", "4.0"),
        ("rsa-linformer-upper-bound", "max_seq_len", "114000.0", "4000.0"),
        ("t1", "memory_mb", "1000.0", "1024.0"),
        ("t1", "memory_mb", "", "1024.0"),
        ("t1", "memory_mb", "2048.0", "1024.0"),
        ("t1", "length", "2200.0", "2000.0"),
        ("t1", "length", "", "4000.0"),
        ("t1", "length", "8000.0", "8000.0"),
    ]
    assert [r["role"] for r in found] == ["predicted", "calibrated"] + ["predicted"] * 5 + ["calibrated"]
    assert [(r["status_published"], r["status_reproduced"]) for r in found] == [
        *[("", "")] * 2,
        *[("ok", "ok"), ("oom", "ok"), ("ok", "ok")] * 2,
    ]
    assert {(r["scenario"], r["variant"]) for r in found} == {("small", "first")}
    assert re.fullmatch(r"bert-tiny/ring\S* / bert-tiny/tensor\S*", found[0]["cell"])
    (run,) = lines_of("results/reproduction/rsa_runs.csv")
    assert (tuple(run), run["cells"], run["ok"], run["failed"]) == (RUNS, "5", "5", "0")
    assert "small: claims" in out
    # one of two statuses of the predicted, and the calibrated one is not in the errors
    assert (
        "t1, memory_mb (first): 2 predicted, median error 26.2%, worst 50.0%; status right in 2 of 3" in out
    )
    assert "t1, length (first): 1 predicted, median error 9.1%, worst 9.1%; status right in 2 of 3" in out
    assert "published oom, ours ok" in out
    assert out.splitlines()[-2:] == ["results/reproduction/rsa.csv", "results/reproduction/rsa_runs.csv"]


def test_numbers_that_no_paper_gives_are_ours_alone(spbench: Run) -> None:
    Path("t1.csv").write_text(PUBLISHED.replace(",,,oom", ",,,unstated"))
    Path("small.yaml").write_text(
        SCENARIO + TABLE + "  - table: t2\n"
        "    published: {file: t1.csv}\n"
        "    match: {ranks: world, how: strategy}\n"
        "    where: {ranks: [4]}\n"
        "    status: status\n"
        "    quantities: {length: {field: answer}}\n"
    )
    _, out, _ = spbench("reproduce", "rsa")
    # not among the statuses that agree or differ
    assert (
        "t1, memory_mb (first): 2 predicted, median error 26.2%, worst 50.0%; status right in 2 of 2" in out
    )
    assert "t2, length (first): no number is published" in out
    (ours,) = [r for r in lines_of("results/reproduction/rsa.csv") if r["table"] == "t2"]
    assert (ours["published"], ours["reproduced"], ours["role"]) == ("", "4000.0", "predicted")
    assert ours["status_published"] == "unstated"


def test_it_goes_on_where_it_was(spbench: Run) -> None:
    spbench("run", "--scenario", "small.yaml", "--world-size", "8")
    assert "5 cells, 1 of them kept from before; running 4" in spbench("reproduce", "rsa")[2]
    first = Path("results/reproduction/rsa.csv").read_bytes()
    assert "running" not in spbench("reproduce", "rsa")[2]
    assert Path("results/reproduction/rsa.csv").read_bytes() == first
    assert "running 5" in spbench("reproduce", "rsa", "--fresh")[2]
    assert (
        "10 cells, 5 of them kept from before; running 5" in spbench("reproduce", "rsa", "--all-variants")[2]
    )
    assert {r["variant"] for r in lines_of("results/reproduction/rsa.csv")} == {"first", "steady"}


def test_another_output_keeps_its_own_cells(spbench: Run) -> None:
    spbench("reproduce", "rsa")
    code, _, err = spbench("reproduce", "rsa", "--output", "o")
    assert (code, "running 5" in err) == (0, True)
    assert Path("o/runs/small/cells.jsonl").is_file()
    assert Path("o/rsa.csv").read_bytes() == Path("results/reproduction/rsa.csv").read_bytes()


def test_formats(spbench: Run) -> None:
    _, out, err = spbench("reproduce", "rsa", "--format", "csv")
    assert out == Path("results/reproduction/rsa.csv").read_text()
    assert "results/reproduction/rsa.csv" in err
    content = json.loads(spbench("reproduce", "rsa", "--format", "json")[1])
    assert (content["paper"], len(content["records"])) == ("rsa", 8)
    assert content["records"][3]["published"] is None


def test_failed_cells_are_exit_code_1(spbench: Run) -> None:
    Path("small.yaml").write_text((SCENARIO + TABLE).replace("sp: [1, 4, 8]", "sp: [1, 4, 8, 5]"))
    code, _, err = spbench("reproduce", "rsa")
    assert (code, "1 of 6 cells failed" in err) == (1, True)
    assert lines_of("results/reproduction/rsa_runs.csv")[0]["failed"] == "1"


def test_the_text_is_what_the_files_give(spbench: Run) -> None:
    Path("REPRODUCE.md").write_text(DOCUMENT)
    code, out, _ = spbench("reproduce", "rsa", "--write")
    text = Path("REPRODUCE.md").read_text()
    assert (code, out.splitlines()[-1]) == (0, "REPRODUCE.md")
    for kept in (
        DOCUMENT[: DOCUMENT.index("<!-- spbench reproduce rsa")],
        "of another paper\n",
        "more by hand\n",
    ):
        assert kept in text
    assert "old" not in text
    assert "5 cells (5 ok), 0 s of one core in all.\n" in text
    assert "| tensor_parallel | tp2 b64 Lmax | 1000 | 1024 | +2.4% | predicted |  |\n" in text
    assert "| small | t1 | memory_mb | first | 3 | 2 | 0 | 26.2% | 50.0% | 2 of 3 |" in text
    files = (Path("results/reproduction", name) for name in ("rsa.csv", "rsa_runs.csv"))
    found = Findings("rsa", *map(read_records, files))
    assert rendered(text, found) == text == rendered(DOCUMENT, found)


WRONG = [
    (("reproduce", "rsaa"), DOCUMENT, "unknown paper 'rsaa'; did you mean 'rsa'?"),
    (("reproduce", "lasp"), DOCUMENT, "no scenario answers to lasp yet"),
    (("reproduce",), DOCUMENT, "Missing argument 'PAPER'"),
    (
        ("reproduce", "rsa", "--write"),
        DOCUMENT.replace("rsa: small", "rsa: summary"),
        "REPRODUCE.md has no part for small: add <!-- spbench reproduce rsa: small --> and <!-- end -->",
    ),
    (
        ("reproduce", "rsa", "--write"),
        DOCUMENT.replace("rsa: summary", "rsa: smal"),
        "REPRODUCE.md: no scenario of rsa is called 'smal'; did you mean 'small'?",
    ),
    (
        ("reproduce", "rsa", "--write"),
        DOCUMENT.replace("\n<!-- end -->", ""),
        "a part begins that does not end",
    ),
    (("reproduce", "rsa", "--output", "small.yaml"), DOCUMENT, "cannot write results to small.yaml/runs"),
]


@pytest.mark.parametrize(("arguments", "document", "message"), WRONG, ids=[wrong[-1] for wrong in WRONG])
def test_mistakes_are_one_line_before_anything_runs(
    spbench: Run, arguments: tuple[str, ...], document: str, message: str
) -> None:
    Path("REPRODUCE.md").write_text(document)
    code, out, err = spbench(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("results").exists()


def test_no_document_to_write_into(spbench: Run) -> None:
    assert (
        spbench("reproduce", "rsa", "--write")[2]
        == "spbench: cannot read REPRODUCE.md: No such file or directory\n"
    )


def test_tables_are_safe_markdown() -> None:
    assert markdown([{"a": "x|y", "b": None, "c": 1}, {"a": "", "b": "", "c": 2}]) == (
        "| a | c |\n| --- | --- |\n| x\\|y | 1 |\n|  | 2 |\n"
    )
    assert markdown([]) == "|  |\n|  |\n"


def test_a_table_of_several_models_names_them() -> None:
    records = [r for r in findings("rsa").records if r["table"] == "rsa-pipeline"]
    ((_, lines), *_) = Findings("rsa", records, []).blocks("rsa_pipeline")
    assert {line["model"] for line in lines} == {"bert-base", "bert-large"}
    base = [r for r in records if "bert-base" in r["cell"]]
    ((_, lines), *_) = Findings("rsa", base, []).blocks("rsa_pipeline")
    assert {line["model"] for line in lines} == {""}


# -- what is committed -----------------------------------------------------------------------------------


def test_scenarios_name_papers_that_are_known() -> None:
    known = {name for paper in papers().values() for name in (paper.name, paper.source)}
    for name in packaged("spbench.scenarios"):
        assert load_scenario(name).document.paper in {*known, ""}, name
    names = {s.name for _, scenarios in scenarios_of("rsa") for s in scenarios}
    assert {"max_batch", "max_seqlen", "communication"} <= names
    assert scenarios_of("all")


def findings(paper: str) -> Findings:
    folder = ROOT / "results" / "reproduction"
    return Findings(paper, read_records(folder / f"{paper}.csv"), read_records(folder / f"{paper}_runs.csv"))


def test_the_committed_text_is_what_the_committed_files_give() -> None:
    """`spbench reproduce rsa --write` makes both; a file that is committed without the other is found out."""
    text, found = (ROOT / "REPRODUCE.md").read_text(), findings("rsa")
    check_document(ROOT / "REPRODUCE.md", "rsa", found.scenarios)
    assert rendered(text, found) == text
    assert all(run["failed"] == "0" for run in found.runs)


def test_the_committed_numbers_are_of_published_ones_as_they_are() -> None:
    """No published number was changed since, and none is missing."""
    found = findings("rsa")
    for _, scenarios in scenarios_of("rsa"):
        for scenario in scenarios:
            if scenario.name not in found.scenarios:
                continue
            mine = {r["table"]: r for r in found.records if r["scenario"] == scenario.name}
            for claim in scenario.document.claims:
                assert mine[claim.claim]["published"] == scenario.published(claim)
            assert {table.table for table in scenario.document.tables} <= mine.keys()


def test_a_document_without_a_part_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "t.md").write_text(DOCUMENT)
    check_document(path, "rsa", ["small"])
    with pytest.raises(UserError, match="has no part for large, larger"):
        check_document(path, "rsa", ["small", "large", "larger"])
