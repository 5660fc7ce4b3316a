"""A kept result is final only while what made it is the same."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import spbench
import spbench.bench.measure.sweep.sweep as digest_module
from spbench.bench import measured_code
from spbench.bench.cell import Cell
from spbench.bench.command_line.cli import exit_code
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines.run_cell import measure, run_cell
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import as_row, changed_parts, is_final, outdated, unfinished
from spbench.bench.measure.sweep.sweep import sweep as sweep_in_workers
from spbench.bench.measured_code import NOT_MEASURING, code_digest, digest_of_files, measuring_files
from spbench.bench.measurement import Outcome
from spbench.bench.row import Row
from spbench.impls.registries import all_models
from tests.bench.fakes import answer
from tests.grid import data

pytestmark = pytest.mark.usefixtures("kept_traces")

SCENARIO = data(__file__)["SCENARIO"]
CLAIM = data(__file__)["CLAIM"]
CLUSTER = """
extends: piz-daint-p100
device: {memory_total_bytes: {value: 3_000_000_000, source: made up}}
"""
RUN = ("run", "--scenario", "small.yaml", "--output", "out", "--format", "json")


def sweep_here(cells: list[Cell], results: ResultsFile, **_: Any) -> list[Row]:
    """A sweep in this process, which measures on the real engine."""
    for cell in unfinished(cells, results):
        results.append(as_row(cell, measure(run_cell, cell)))
    return [results.rows[cell.key] for cell in cells]


@pytest.fixture(autouse=True)
def _small_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep_cells", sweep_here)
    Path("small.yaml").write_text(SCENARIO)
    Path("own.yaml").write_text(CLUSTER)


def test_a_changed_cluster_file_gives_todays_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(RUN) == 0
    before = [row["measurement"]["answer"] for row in json.loads(capsys.readouterr().out)["rows"]]
    Path("own.yaml").write_text(CLUSTER.replace("3_000_000_000", "1_500_000_000"))
    assert exit_code(RUN) == 0
    captured = capsys.readouterr()
    after = [row["measurement"]["answer"] for row in json.loads(captured.out)["rows"]]
    assert 0 < after[0] < before[0]
    assert after[1] == before[1]
    said = "small: 1 of 2 earlier results are out of date and run again; changed: cluster (1)"
    assert said in captured.err
    assert "1 of them kept from before; running 1" in captured.err


def test_a_dry_run_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(RUN)
    Path("own.yaml").write_text(CLUSTER.replace("3_000_000_000", "1_500_000_000"))
    capsys.readouterr()
    exit_code([*RUN, "--dry-run"])
    captured = capsys.readouterr()
    assert [line["now"] for line in json.loads(captured.out)] == ["would run", "kept (ok)"]
    assert "changed: cluster (1)" in captured.err


def test_a_run_digests_each_cell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is run, kept, or listed by a dry run."""
    digested: list[str] = []

    def counted(name: str) -> Cluster:
        digested.append(name)
        return load_cluster(name)

    monkeypatch.setattr(digest_module, "load_cluster", counted)
    monkeypatch.setattr(
        "spbench.bench.measure.sweep.sweep.sweep_cells", functools.partial(sweep_in_workers, run=answer)
    )
    for words in (RUN, RUN, (*RUN, "--dry-run")):
        digested.clear()
        assert exit_code(words) == 0
        assert sorted(digested) == ["own.yaml", "piz-daint-p100"]
    for output in ("out", "other"):
        digested.clear()
        spbench.run("small.yaml", jobs=0, output=output)
        assert sorted(digested) == ["own.yaml", "piz-daint-p100"]


def test_comments_and_sources_do_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(RUN)
    other = CLUSTER.replace("made up", "measured") + "# a comment\nabout: ours\n"
    Path("own.yaml").write_text(other)
    capsys.readouterr()
    exit_code(RUN)
    assert "2 cells, 2 of them kept from before\n" in capsys.readouterr().err


def test_an_outdated_row_of_another_cell_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is narrowed to some cells uses the earlier rows of the others, if they are current."""
    own = "{strategy: tensor_parallel, cluster: own.yaml"
    Path("small.yaml").write_text(SCENARIO.replace("{strategy: single, cluster: own.yaml", own) + CLAIM)
    exit_code(RUN)
    before = json.loads(capsys.readouterr().out)["comparison"]
    Path("own.yaml").write_text(CLUSTER.replace("3_000_000_000", "2_900_000_000"))
    exit_code([*RUN, "--strategy", "single"])
    after = json.loads(capsys.readouterr().out)["comparison"]
    assert before[0]["reproduced"] is not None
    assert (after[0]["reproduced"], after[0]["note"]) == (None, "cell was not run")


def test_a_cluster_file_that_is_edited_while_cells_run(tmp_path: Path) -> None:
    """The row may be of the old file or of the new: the next sweep runs the cell again."""
    cells = [cell for cell in load_scenario("small.yaml").cells[""] if cell.cluster == "own.yaml"]

    def edit(cell: Cell) -> None:
        Path("own.yaml").write_text(CLUSTER.replace("3_000_000_000", "1_500_000_000"))

    with ResultsFile(tmp_path) as results:
        rows = sweep_in_workers(cells, results, run=answer, on_start=edit)
        assert rows[0]["status"] == "ok"
        assert unfinished(cells, results) == cells
        sweep_in_workers(cells, results, run=answer)
        assert unfinished(cells, results) == []


SINGLE = Cell(model="bert-tiny", strategy="ring_self_attention", batch=2, seq_len=8, cluster="piz-daint-p100")


def row_of(cell: Cell) -> Row:
    return as_row(cell, Outcome("ok"))


def test_each_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(SINGLE)
    assert changed_parts(SINGLE, row) == []
    assert is_final(SINGLE, row)

    def changed(name: str, value: object) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(digest_module, name, value)
            assert not is_final(SINGLE, row)
            return changed_parts(SINGLE, row)

    cluster = load_cluster("piz-daint-p100")
    denser = cluster.model_copy(update={"devices_per_node": 2})
    assert changed("load_cluster", lambda name: denser) == ["cluster"]
    preset = replace(all_models()["bert-tiny"], layers=7)  # type: ignore[type-var]
    assert changed("model_preset", lambda *arguments: preset) == ["model"]
    assert changed("asdict", lambda options: {"block": 3}) == ["strategy"]
    assert changed("code_digest", lambda: "other") == ["code"]
    assert changed("installed_version", lambda name: "99") == ["torch"]


def test_a_row_without_a_digest_is_out_of_date() -> None:
    row = Row(**{name: value for name, value in row_of(SINGLE).items() if name != "digest"})
    assert not is_final(SINGLE, row)
    assert outdated([SINGLE], {SINGLE.key: row}) == (
        "1 of 1 earlier results are out of date and run again; changed: from a version without digests (1)"
    )
    assert outdated([SINGLE], {SINGLE.key: row_of(SINGLE)}) == outdated([SINGLE], {}) == ""
    failed = as_row(SINGLE, Outcome("failed"))
    failed["digest"]["code"] = ""
    assert outdated([SINGLE], {SINGLE.key: failed}) == ""  # it is run again for another reason


def digest_with(root: Path, name: str, text: str) -> str:
    """The digest of the measuring files below a folder, one of which is written first."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return digest_of_files(root, measuring_files(root))


def test_code_is_what_a_measurement_may_run(tmp_path: Path) -> None:
    first = digest_with(tmp_path, "impls/strategies/lasp.py", "a = 1")
    assert digest_with(tmp_path, "impls/strategies/lasp.py", "a = 2") != first
    assert digest_with(tmp_path, "impls/strategies/lasp.py", "a = 1") == first
    for other in (
        "bench/tools/run/run_command.py",
        "bench/measure/scenarios/select.py",
        "bench/command_line/cli.py",
    ):
        assert digest_with(tmp_path, other, "b = 1") == first
    assert digest_with(tmp_path, "bench/measure/engines/a_new_one.py", "") != first
    before = digest_with(tmp_path, "bench/a_new_room/power.py", "")
    assert digest_with(tmp_path, "bench/cell.py", "") != before
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert digest_of_files(tmp_path / "copy", measuring_files(tmp_path / "copy")) == digest_of_files(
        tmp_path, measuring_files(tmp_path)
    )


CODE = data(__file__)["CODE"]


def test_what_the_code_means_makes_the_digest(tmp_path: Path) -> None:
    first = digest_with(tmp_path, "impls/ring.py", CODE)
    for old, new in (
        ('"""About."""\n', "# a comment\n\n"),
        ('"""How many."""', "'more than\\nbefore'"),
        ("  # with its own", ""),
        ("[n, 1]", "[\n            n,\n            1,\n        ]"),
    ):
        assert digest_with(tmp_path, "impls/ring.py", CODE.replace(old, new)) == first
    for old, new in (
        ("[n, 1]", "[n, 2]"),
        ("[n, 1]", "[n, True]"),
        ("[n, 1]", "[n], 1"),
        ("n: int", "n: str"),
        ("Ring", "Line"),
        ("        return", "        ''\n        return"),
    ):
        assert digest_with(tmp_path, "impls/ring.py", CODE.replace(old, new)) != first


def test_digests_of_files_are_kept_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    first = digest_with(tmp_path, "impls/ring.py", "a = 1")
    monkeypatch.setattr(measured_code, "_SETTLED_NS", 0)
    assert digest_with(tmp_path, "impls/ring.py", "a = 1") == first
    with monkeypatch.context() as patched:
        patched.setattr(measured_code.ast, "parse", None)  # is not needed
        assert digest_of_files(tmp_path, measuring_files(tmp_path)) == first
    assert digest_with(tmp_path, "impls/ring.py", "a = 11") != first
    for content in (b"", b"[]", b'{"a": 1}', b"\xff"):
        (tmp_path / "cache" / "code.json").write_bytes(content)
        assert digest_with(tmp_path, "impls/ring.py", "a = 1") == first
    # the door of impls says from which module a name comes
    assert digest_with(tmp_path, "impls/__init__.pyi", "from ring import a as a") != first


def test_rooms_that_do_not_measure_are_there() -> None:
    """Under another name a room would count, and every edit of it would make all rows run again."""
    bench = Path(measured_code.__file__).resolve().parent
    assert not [each for each in NOT_MEASURING if not (bench / each).exists()]


def test_a_plug_in_is_part_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("digested_plugin", "digested-1.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / "digested-1.dist-info" / "METADATA").write_text("Name: digested\nVersion: 1\n")
    entry = "[spbench.strategies]\nmine = digested_plugin.strategy:Mine\n"
    (tmp_path / "digested-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "digested_plugin" / "__init__.py").write_text("")
    (tmp_path / "digested_plugin" / "strategy.py").write_text("first = True")
    before = code_digest.__wrapped__()
    (tmp_path / "digested_plugin" / "strategy.py").write_text("first = False")
    assert code_digest.__wrapped__() != before
