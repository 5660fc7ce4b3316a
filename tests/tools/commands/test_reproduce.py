"""Reproduction of a paper: its files, and what is printed."""

import csv
from pathlib import Path

import pytest
from pandas import DataFrame

from spbench.bench.git import git
from spbench.bench.tools.papers.comparison import draw
from tests.grid import tabled
from tests.tools.commands.conftest import Run
from tests.tools.commands.small_paper import PUBLISHED, SMALL, TABLE, refuses, spbench

__all__ = ["spbench"]


def lines_of(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_one_scenario_of_a_paper_alone(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run again; what the files have of the paper's other scenarios stays as it is."""
    Path("other.yaml").write_text(SMALL)
    both = lambda package: {name: Path(name) for name in ("other.yaml", "small.yaml")}  # noqa: E731
    monkeypatch.setattr("spbench.bench.tools.papers.sources.packaged", both)
    assert spbench("reproduce", "rsa/small")[0] == 0
    assert [run["scenario"] for run in lines_of("results/reproduction/rsa_runs.csv")] == ["small"]
    code, _, err = spbench("reproduce", "rsa")
    # the cells of both are one progress, without those that are kept
    assert (code, "[5/5] " in err, "/10]" in err) == (0, True, False)
    of_both = lines_of("results/reproduction/rsa.csv")
    path = Path("results/reproduction/rsa_runs.csv")
    path.write_text(path.read_text().replace("other,5", "other,77"))
    code, out, _ = spbench("reproduce", "rsa/small", "--fresh")
    assert (code, "other: claims" in out, "small: claims" in out) == (0, False, True)
    assert lines_of("results/reproduction/rsa.csv") == of_both
    runs = [(run["scenario"], run["cells"]) for run in lines_of("results/reproduction/rsa_runs.csv")]
    assert runs == [("other", "77"), ("small", "5")]
    Path("other.yaml").write_text(SMALL.replace("batch: 64", "batch: 32"))
    changed = "spbench: rsa/other has changed since it was run, and its numbers here are older; "
    assert changed + "`spbench reproduce rsa/other` runs it again" in spbench("reproduce", "rsa/small")[2]
    code, _, err = spbench("reproduce", "rsa/smal")
    assert (code, err) == (
        2,
        "spbench: no scenario 'smal' answers to rsa; did you mean 'small'? (choices: other, small)\n",
    )


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


def test_what_git_follows_is_not_written_unless_it_is_asked_for(spbench: Run) -> None:
    """The files of a committed reproduction are read, for the scenarios that are not run."""
    assert spbench("reproduce", "rsa")[0] == 0
    for words in ("init -q", "add results/reproduction", "-c user.name=a -c user.email=a@b commit -qm first"):
        git(Path(), *words.split())
    Path("small.yaml").write_text(SMALL.replace("batch: 64", "batch: 32"))
    status = ("status", "--porcelain", "--untracked-files=no")
    for paper in ("rsa", "rsa/small"):
        code, _, err = spbench("reproduce", paper)
        assert (code, "results go to results/runs/reproduction; --write writes" in err) == (0, True)
        assert git(Path(), *status) == ""
    here, there = lines_of("results/runs/reproduction/rsa.csv"), lines_of("results/reproduction/rsa.csv")
    assert (here != there, Path("results/runs/small/cells.jsonl").is_file()) == (True, True)
    assert spbench("reproduce", "rsa", "--output", "results/reproduction")[0] == 0
    assert git(Path(), *status) != ""


def test_failed_cells_are_exit_code_1(spbench: Run) -> None:
    Path("small.yaml").write_text((SMALL).replace("sp: [1, 4, 8]", "sp: [1, 4, 8, 5]"))
    code, _, err = spbench("reproduce", "rsa")
    assert (code, "1 of 6 cells failed" in err) == (1, True)
    (line,) = lines_of("results/reproduction/rsa_runs.csv")
    assert (line["failed"], line["torch"], line["commit"]) == ("1", "2", "abc")


@tabled(__file__, "mistakes_are_one_line_before_anything_runs")
def test_mistakes_are_one_line_before_anything_runs(spbench: Run, arguments: str, message: str) -> None:
    refuses(spbench, arguments, message)


def test_a_figure_of_all_numbers_is_drawn_where_plots_has_one_of_the_papers_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"published": 2.0, "reproduced": 2.1, "relative_error": 0.05, "role": "predicted"}
    records = [{"table": "t: a", "quantity": "step_time_ms", **numbers}]
    drawn, failed = draw("measured", [], DataFrame(records), tmp_path)
    assert tmp_path / "measured.png" in drawn
    assert not failed
    assert draw("no_such_paper", [], DataFrame(records), tmp_path) == ([], False)
    assert capsys.readouterr().err == ""
    assert draw("measured", [], DataFrame([{"table": "t: a"}]), tmp_path) == ([], True)
    assert "the figure measured could not be drawn: KeyError" in capsys.readouterr().err
