"""spbench compare: worse is exit code 1, and files that cannot be read are one line; the
committed rows that later runs are held against."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.changes.baseline_command import FOLDER
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.papers.comparison import Comparison
from tests.bench.fakes import SCENARIO
from tests.tools.changes.rows import ENTRY, ROWS, TABLE, row
from tests.tools.changes.rows import judged_folder as folder
from tests.tools.commands.conftest import Run


def damaged(path: Path, field: str, text: str) -> Path:
    """Results in which the first number of a field is written as this text."""
    place = folder(path, ROWS)
    rows = (place / "cells.jsonl").read_text()
    (place / "cells.jsonl").write_text(re.sub(rf'("{field}": \[?)[0-9.]+', rf"\g<1>{text}", rows, count=1))
    return place


@pytest.mark.parametrize("field", ["peak_memory_bytes", "step_time_s", "answer", "sent_bytes"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_worse_in_new_and_an_error_in_base(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], field: str, text: str
) -> None:
    spoilt = damaged(tmp_path / "new", field, text)
    assert exit_code(["compare", str(base), str(spoilt), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert [(d["verdict"], d["where"], d["quantity"].split(".")[-1], d["new"]) for d in found] == [
        ("worse", "a", field, None)
    ]
    assert exit_code(["compare", str(spoilt), str(base)]) == 2
    assert "cells.jsonl:1: not a result row" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "true", '"5"', "1" + "0" * 400, "[]"])
def test_a_number_that_cannot_be_is_never_better(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    spoilt = damaged(tmp_path / "new", "peak_memory_bytes", text)
    for pair in ((base, spoilt), (spoilt, base)):
        assert exit_code(["compare", *map(str, pair)]) == 2
        error = capsys.readouterr().err
        assert (error.count("\n"), "cells.jsonl:1: " in error) == (1, True)
        assert "measurement.peak_memory_bytes: " in error


def test_an_error_that_is_not_finite_is_worse(tmp_path: Path, base: Path) -> None:
    place = folder(tmp_path / "new", ROWS)
    text = (place / "comparison.csv").read_text()
    (place / "comparison.csv").write_text(text.replace("0.1,", "nan,"))
    differences = judge(read_results(base), read_results(place, judged=True)).differences
    assert [(d.verdict, d.where, d.quantity) for d in differences] == [("worse", "ratio v", "error")]
    with pytest.raises(UserError, match="relative_error: 'nan' is no finite number"):
        read_results(place)


def test_nothing_judged_is_not_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same cells, timed on two machines."""
    places = []
    for host in ("here", "there"):
        measurement = {"step_time_s": 1.0, "step_time_samples_s": [1.0] * 5}
        entry = {**row("c/gloo"), "measurement": measurement, "provenance": {"host": host}}
        places.append(folder(tmp_path / host, [entry]))
        (places[-1] / "comparison.csv").unlink()
    assert exit_code(["compare", *map(str, places)]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "NOT JUDGED: 0 cells equal, 1 not judged in full"
    assert exit_code(["export", "--to", "markdown", str(places[1]), "--base", str(places[0])]) == 0
    assert "## spbench: not judged" in capsys.readouterr().out
    assert exit_code(["export", "--to", "junit", str(places[1]), "--base", str(places[0])]) == 0
    assert 'message="not judged in full; 1 measured metric not judged: base was' in capsys.readouterr().out


def test_what_was_not_run_is_said(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        folder(tmp_path / "bases" / name, ROWS)
    words = [str(folder(tmp_path / "one", ROWS)), "--base", str(tmp_path / "bases")]
    for system, text in (("markdown", "**Not run:** two."), ("junit", 'message="not run"')):
        assert exit_code(["export", "--to", system, *words]) == 0
        assert text in capsys.readouterr().out


def test_a_subset_may_lack_cells_and_their_claims(tmp_path: Path, base: Path) -> None:
    part = folder(tmp_path / "new", ROWS[:1], Comparison(**{**vars(ENTRY), "relative_error": None}))
    assert exit_code(["compare", str(base), str(part)]) == 1
    assert exit_code(["compare", str(base), str(part), "--subset"]) == 1  # of the table, the cell is there
    part = folder(tmp_path / "new", ROWS[:1], Comparison(**{**vars(ENTRY), "relative_error": None}), TABLE)
    assert exit_code(["compare", str(base), str(part), "--subset"]) == 0
    rows = copy.deepcopy(ROWS[:1])
    rows[0]["measurement"]["answer"] = 1
    part = folder(tmp_path / "new", rows, TABLE)
    assert exit_code(["compare", str(base), str(part), "--subset"]) == 1


def test_files_without_a_comparison(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["compare", str(base / "cells.jsonl"), str(base)]) == 0
    assert exit_code(["compare", str(base), str(base / "cells.jsonl")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == out[3:]
    assert "errors against published numbers are not judged" in out[0]
    assert out[1] == "note: 2 measured metrics not judged: there are no samples"
    assert out[2] == "not worse: 2 cells equal, 3 not judged in full"
    (other := folder(tmp_path / "new", ROWS)).joinpath("comparison.csv").unlink()
    assert exit_code(["compare", str(base), str(other)]) == 1  # a folder should have it


def unreadable(path: Path) -> Iterator[tuple[Path, str]]:
    yield path / "absent", "no such file"
    yield folder(path / "empty", []), "has no rows"
    cut = folder(path / "cut", ROWS) / "cells.jsonl"
    cut.write_text(cut.read_text()[:-9])
    yield cut.parent, "cells.jsonl:3: not a result row; mend or remove the line"
    (spoilt := folder(path / "spoilt", ROWS)).joinpath("comparison.csv").write_text("claim,published\nx,1\n")
    yield spoilt, "no column 'variant'"
    (words := folder(path / "words", ROWS)).joinpath("comparison.csv").write_bytes(b"\xff\xfe")
    yield words, "comparison.csv"
    text = (folder(path / "number", ROWS) / "comparison.csv").read_text()
    (path / "number" / "comparison.csv").write_text(text.replace("0.1", "a tenth"))
    yield path / "number", "row 1: relative_error: 'a tenth' is no finite number"


def test_unreadable_files_are_one_line(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, message in unreadable(tmp_path):
        for pair in ((base, path), (path, base)):
            assert exit_code(["compare", *map(str, pair)]) == 2
            output = capsys.readouterr()
            assert (output.out, output.err.count("\n")) == ("", 1)
            assert message in output.err
    with pytest.raises(UserError, match="no such file"):
        read_results(tmp_path / "absent")


BASELINE = ("baseline", "--scenario", "small.yaml")
SMALL = Path("results/baseline/small")


def test_a_baseline_is_the_same_bytes_each_time(spbench: Run) -> None:
    files = [SMALL / name for name in ("cells.jsonl", "comparison.csv")]
    code, out, _ = spbench(*BASELINE)
    assert (code, out.splitlines()) == (0, [*map(str, files)])
    first = [file.read_bytes() for file in files]
    code, _, err = spbench(*BASELINE)
    assert (code, "running 5" in err) == (0, True)  # afresh
    assert [file.read_bytes() for file in files] == first
    rows = [json.loads(line) for line in first[0].splitlines()]
    keys = [row["key"] for row in rows]
    assert (keys, len(keys)) == (sorted(keys), 5)
    assert set(rows[0]) == {"key", "cell", "status", "reason", "measurement"}
    assert "step_time_samples_s" not in rows[0]["measurement"]
    code, _, err = spbench(*BASELINE, "--resume")
    assert (code, "running" in err) == (0, False)


def test_a_run_is_not_worse_than_its_baseline(spbench: Run) -> None:
    run = ("run", "--scenario", "small.yaml")
    assert spbench(*BASELINE)[0] == 0
    assert spbench(*run, "--fresh")[0] == 0
    assert spbench("compare", str(SMALL), "results/runs/small")[0] == 0
    assert spbench(*run, "--output", "part", "--world-size", "8")[0] == 0
    assert spbench("compare", str(SMALL), "part", "--subset")[0] == 0
    assert spbench("compare", str(SMALL), "part")[0] == 1


def test_failures_make_no_baseline(spbench: Run) -> None:
    Path("small.yaml").write_text(SCENARIO.replace("sp: [1, 4, 8]", "sp: [1, 4, 8, 5]"))
    assert spbench(*BASELINE)[0] == 1  # five ranks are a fault
    assert not SMALL.exists()
    assert spbench("baseline")[0] == 2
    assert spbench(*BASELINE, "--variant", "x")[0] == 2


def test_baselines_are_of_virtual_ranks(spbench: Run) -> None:
    Path("small.yaml").write_text(SCENARIO.replace("defaults:", "defaults:\n  engine: distributed"))
    assert spbench(*BASELINE)[0] == 0
    rows = read_results(SMALL).cells.values()
    assert {row["cell"]["engine"] for row in rows} == {"virtual"}


def test_the_committed_baseline_is_of_the_gate_as_it_is() -> None:
    """Every cell of scenarios/gate.yaml, and no other, is in results/baseline/gate."""
    keys = {cell.key for cell in load_scenario("gate").cells[""]}
    assert read_results(Path(__file__).parents[3] / FOLDER / "gate").cells.keys() == keys
