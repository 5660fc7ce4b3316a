"""Reproduction of a paper: its files, what is printed, and the generated parts of a text."""

import csv
import json
import re
from pathlib import Path

import pytest

from spbench.bench.commands.execution import draw_records
from spbench.bench.commands.reproduce import RUNS
from spbench.bench.config.scenario import load_scenario
from spbench.bench.published.comparison import read_records
from spbench.bench.reproduction.document import rendered_documents
from spbench.bench.reproduction.findings import RECORDS, Findings
from tests.bench.commands.conftest import Run
from tests.bench.disk import files_of_at_most
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
"""
PUBLISHED = """ranks,how,memory_mb,length,status
2,tensor_parallel,1000,2200,ok
4,ring_self_attention,,,oom
8,ring_self_attention,2048,8000,ok
"""
#: row 3 of t1.csv decided a setting, by its length
LOOKED_AT = """
  - setting: "model_options.dropout: 0.0"
    answers: [t1]
    quantities: [length]
    rows: [{ranks: 8}]
    reason: it fits
not_reproduced: >
  Two ranks: we
  do not know why.
"""
SMALL = SCENARIO + LOOKED_AT + TABLE
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
<!-- spbench reproduce rsa: small -->
old
<!-- end -->
more by hand
"""


@pytest.fixture
def spbench(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """As in other tests of commands, where small.yaml is another and the only scenario."""
    monkeypatch.setattr("spbench.bench.reproduction.papers.packaged", lambda package: ["small.yaml"])
    Path("small.yaml").write_text(SMALL)
    Path("t1.csv").write_text(PUBLISHED)
    made_by(monkeypatch, "abc")
    return spbench


def made_by(monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """Let rows be made by the code of that commit."""
    monkeypatch.setattr("spbench.bench.sweep.sweep.provenance", lambda: {"torch": "2", "commit": commit})


def write_documents() -> None:
    Path("REPRODUCE.md").write_text(PAGE)
    Path("results/reproduction").mkdir(parents=True, exist_ok=True)
    Path("results/reproduction/rsa.md").write_text(DETAILS)


def lines_of(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_one_scenario_of_a_paper_alone(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run again; what the files have of the paper's other scenarios stays as it is."""
    Path("other.yaml").write_text(SMALL)
    both = lambda package: ["other.yaml", "small.yaml"]  # noqa: E731
    monkeypatch.setattr("spbench.bench.reproduction.papers.packaged", both)
    assert spbench("reproduce", "rsa/small")[0] == 0
    assert [run["scenario"] for run in lines_of("results/reproduction/rsa_runs.csv")] == ["small"]
    assert spbench("reproduce", "rsa")[0] == 0
    of_both = lines_of("results/reproduction/rsa.csv")
    path = Path("results/reproduction/rsa_runs.csv")
    path.write_text(path.read_text().replace("other,5", "other,77"))
    code, out, _ = spbench("reproduce", "rsa/small", "--fresh")
    assert (code, "other: claims" in out, "small: claims" in out) == (0, False, True)
    assert lines_of("results/reproduction/rsa.csv") == of_both
    runs = [(run["scenario"], run["cells"]) for run in lines_of("results/reproduction/rsa_runs.csv")]
    assert runs == [("other", "77"), ("small", "5")]
    code, _, err = spbench("reproduce", "rsa/smal")
    assert (code, err) == (
        2,
        "spbench: no scenario 'smal' answers to rsa; did you mean 'small'? (known: other, small)\n",
    )


def test_every_published_number_has_a_line(spbench: Run) -> None:
    code, out, _ = spbench("reproduce", "rsa")
    assert code == 0
    found = lines_of("results/reproduction/rsa.csv")
    assert tuple(found[0]) == RECORDS
    shown = (*RECORDS[:1], *RECORDS[3:6], *("role", "status_published", "status_reproduced"))
    assert [",".join(record[name] for name in shown) for record in found] == [
        "rsa-max-seqlen-base,ratio,3.0,4.0,predicted,,",
        "rsa-linformer-upper-bound,max_seq_len,114000.0,4000.0,inferred,,",
        "t1,memory_mb,1000.0,1024.0,predicted,ok,ok",
        "t1,memory_mb,,1024.0,predicted,oom,ok",
        "t1,memory_mb,2048.0,1024.0,predicted,ok,ok",
        "t1,length,2200.0,2000.0,predicted,ok,ok",
        "t1,length,,4000.0,predicted,oom,ok",
        "t1,length,8000.0,8000.0,inferred,ok,ok",
    ]
    assert {(r["scenario"], r["variant"]) for r in found} == {("small", "first")}
    assert re.fullmatch(r"bert-tiny/ring\S* / bert-tiny/tensor\S*", found[0]["cell"])
    assert found[0]["source"] == "rsa_claims.csv:rsa-max-seqlen-base:published"
    assert found[2]["source"] == "t1.csv:1:memory_mb"
    (run,) = lines_of("results/reproduction/rsa_runs.csv")
    assert (tuple(run), run["cells"], run["ok"], run["failed"]) == (RUNS, "5", "5", "0")
    assert "small: claims" in out
    # an error for each role: of the two lengths, one decided a setting
    for line in (
        "t1, memory_mb (first): 2 predicted, median error 26.2%, worst 50.0%; status right in 2 of 3",
        "t1, length (first): 1 predicted, median error 9.1%, worst 9.1%; 1 inferred, median error 0.0%, ",
        "published oom, ours ok",
    ):
        assert line in out
    assert out.splitlines()[-2:] == ["results/reproduction/rsa.csv", "results/reproduction/rsa_runs.csv"]


def test_numbers_that_no_paper_gives_are_ours_alone(spbench: Run) -> None:
    Path("t1.csv").write_text(PUBLISHED.replace(",,,oom", ",,,unstated"))
    other = TABLE.partition("tables:\n")[2].replace("t1\n", "t2\n", 1) + "    where: {ranks: [4]}\n"
    Path("small.yaml").write_text(SMALL + other)
    _, out, _ = spbench("reproduce", "rsa")
    # not among the statuses that agree or differ
    assert (
        "t1, memory_mb (first): 2 predicted, median error 26.2%, worst 50.0%; status right in 2 of 2" in out
    )
    assert "t2, length (first): no published number at hand" in out
    (ours,) = [
        r for r in lines_of("results/reproduction/rsa.csv") if (r["table"], r["quantity"]) == ("t2", "length")
    ]
    assert (ours["published"], ours["reproduced"], ours["role"]) == ("", "4000.0", "predicted")
    assert ours["status_published"] == "unstated"


def test_it_goes_on_where_it_was(spbench: Run) -> None:
    spbench("run", "--scenario", "small.yaml", "--world-size", "8")
    assert "5 cells, 1 of them kept from before; running 4" in spbench("reproduce", "rsa")[2]
    first = Path("results/reproduction/rsa.csv").read_bytes()
    assert "running" not in spbench("reproduce", "rsa")[2]
    assert Path("results/reproduction/rsa.csv").read_bytes() == first
    assert "running 5" in spbench("reproduce", "rsa", "--fresh")[2]
    assert "10 cells, 5 of them kept from before" in spbench("reproduce", "rsa", "--all-variants")[2]
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
    assert (content["paper"], len(content["records"]), content["records"][3]["published"]) == ("rsa", 8, None)


def test_failed_cells_are_exit_code_1(spbench: Run) -> None:
    Path("small.yaml").write_text((SMALL).replace("sp: [1, 4, 8]", "sp: [1, 4, 8, 5]"))
    code, _, err = spbench("reproduce", "rsa")
    assert (code, "1 of 6 cells failed" in err) == (1, True)
    assert lines_of("results/reproduction/rsa_runs.csv")[0]["failed"] == "1"


def test_the_text_is_what_the_files_give(spbench: Run) -> None:
    write_documents()
    code, out, _ = spbench("reproduce", "rsa", "--write")
    assert (code, out.splitlines()[-2:]) == (0, ["REPRODUCE.md", "results/reproduction/rsa.md"])
    page, details = Path("REPRODUCE.md").read_text(), Path("results/reproduction/rsa.md").read_text()
    for kept in (PAGE[: PAGE.index("<!-- spbench reproduce rsa")], "of another paper\n", "more by hand\n"):
        assert kept in page
    assert "old" not in details
    assert details.endswith("<!-- end -->\nmore by hand\n")
    assert "5 cells (5 ok), 0 s of one core in all.\n" in details
    assert "| tensor_parallel | tp2 b64 Lmax | 1000 | 1024 | +2.4% | predicted |  |\n" in details
    link = "[A small scenario](results/reproduction/rsa.md#small)"
    claims = "1 predicted, median error 33.3%, worst 33.3%; 1 inferred, median error 96.5%, worst 96.5%"
    assert f"| {link} | claims | first | 2 | {claims} |  | Two ranks: we do not know why. |\n" in page
    memory = "2 predicted, median error 26.2%, worst 50.0%"
    assert f"|  | t1: memory_mb | first | 2 | {memory} | 2 of 3 |  |\n" in page
    records, runs = (read_records(Path("results/reproduction", f"rsa{kind}.csv")) for kind in ("", "_runs"))
    found = Findings("rsa", records, runs, {"small": load_scenario("small.yaml").document})
    assert [*rendered_documents(found).values()] == [page, details]


def test_a_number_that_is_compared_several_times_counts_once(spbench: Run) -> None:
    write_documents()
    spbench("reproduce", "rsa", "--write", "--all-variants")
    page = Path("REPRODUCE.md").read_text()
    lines = [line.split(" | ") for line in page.splitlines() if " | claims | " in line or "t1: " in line]
    assert sorted((line[1], line[2], line[3]) for line in lines) == [
        (what, variant, "2")
        for what in ("claims", "t1: length", "t1: memory_mb")
        for variant in ("first", "steady")
    ]
    # of both variants, and of the first only
    whole = "| **all of the paper** |  |  | 6 | 4 predicted, "
    assert whole in page
    spbench("reproduce", "rsa", "--write")
    assert whole in Path("REPRODUCE.md").read_text()


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
        "spbench: small: rows were made by code that is in no commit (abc-dirty), so that nothing is "
        "written; commit it, and run again with --fresh"
    )
    assert Path("REPRODUCE.md").read_text() == PAGE
    assert not Path("results/reproduction/rsa.csv").exists()
    assert spbench("reproduce", "rsa")[0] == 0  # to look at, it is good enough


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rsaa", "unknown paper 'rsaa'; did you mean 'rsa'?"),
        ("lasp", "no scenario answers to lasp yet"),
        ("", "Missing argument 'PAPER'"),
        ("rsa --output small.yaml", "cannot write results to small.yaml/runs"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(spbench: Run, arguments: str, message: str) -> None:
    refuses(spbench, arguments, message)


def refuses(spbench: Run, arguments: str, message: str) -> None:
    code, out, err = spbench("reproduce", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("results/runs").exists()


@pytest.mark.parametrize(
    ("document", "text", "message"),
    [
        ("REPRODUCE.md", None, "cannot read REPRODUCE.md: No such file or directory"),
        ("results/reproduction/rsa.md", None, "cannot read results/reproduction/rsa.md: No such file"),
        ("results/reproduction/rsa.md", "nothing", f"rsa.md has no part for small: {ADD.format('small')}"),
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


def test_a_figure_of_all_numbers_is_drawn_where_plots_has_one_of_the_papers_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"published": 2.0, "reproduced": 2.1, "relative_error": 0.05, "role": "predicted"}
    records = [{"table": "t: a", "quantity": "step_time_ms", **numbers}]
    drawn, failed = draw_records("measured", records, tmp_path)
    assert tmp_path / "measured.png" in drawn
    assert not failed
    assert draw_records("no_such_paper", records, tmp_path) == ([], False)
    assert capsys.readouterr().err == ""
    assert draw_records("measured", [{"table": "t: a"}], tmp_path) == ([], True)
    assert "the figure measured could not be drawn: KeyError" in capsys.readouterr().err
