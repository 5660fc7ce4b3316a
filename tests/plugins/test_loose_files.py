"""Strategies and models in files that are in no package, named by their paths."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import spbench
from spbench.bench.cell import Cell
from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.choices import cell_names
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measure.sweep.dask_task import Installation
from spbench.bench.measured_code import code_digest
from spbench.impls import loose_files
from spbench.impls.loose_files import LOOSE_FILES, exits_refused
from tests.grid import data, tabled
from tests.plugins.additions import EXAMPLES

STRATEGY = (EXAMPLES / "gathered_attention.py").read_text()
SCENARIO = data(__file__)["SCENARIO"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With naive.py, a strategy, and lm.py, a model; files that a test adds are forgotten afterwards."""
    monkeypatch.setenv(LOOSE_FILES, "")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "naive.py").write_text(STRATEGY.replace('"gathered_attention"', '"naive"'))
    (tmp_path / "files" / "lm.py").write_text((EXAMPLES / "one_layer_lm.py").read_text())
    code_digest.cache_clear()
    yield tmp_path / "files"
    code_digest.cache_clear()


def test_a_scenario_names_files_beside_it(folder: Path) -> None:
    scenario = folder / "s.yaml"
    named = SCENARIO.replace("STRATEGIES", "[./naive.py, tensor_parallel+naive.py]")
    scenario.write_text(named.replace("bert-tiny", "lm.py"))
    table = spbench.run(scenario, jobs=1, where=[("sizes.sp", "2")])
    assert list(table.strategy) == ["naive", "tensor_parallel+naive"]
    assert {*table.model} == {"one-layer-lm-tiny"}
    assert {*table.status} == {"ok"}


def test_a_file_takes_the_place_of_what_a_scenario_has(folder: Path) -> None:
    (folder / "s.yaml").write_text(SCENARIO.replace("STRATEGIES", "[all_gather_kv, ring_attention]"))
    scenario = spbench.load_scenario(folder / "s.yaml")

    def cells(*strategies: str, models: tuple[str, ...] = ()) -> list[tuple[str, str]]:
        narrowing = Narrowing(strategies=strategies, models=models)
        return [(cell.strategy, cell.model) for cell in narrowing.cells(scenario)]

    naive, model = str(folder / "naive.py"), str(folder / "lm.py")
    assert cells(naive) == [("naive", "bert-tiny")]
    assert cells("ring_attention", naive) == [("ring_attention", "bert-tiny"), ("naive", "bert-tiny")]
    assert cells("tensor_parallel", models=(model,)) == [("tensor_parallel", "one-layer-lm-tiny")]
    with pytest.raises(UserError, match=r"no cell with strategy tensor_parallel.naive"):
        cells(f"tensor_parallel+{naive}")


def test_rows_are_out_of_date_when_the_file_changes(folder: Path) -> None:
    before = code_digest()
    cell_names("strategy", str(folder / "naive.py"))
    there = Installation.here()
    (folder / "naive.py").write_text(STRATEGY + "\nCHANGED = 1\n")
    here = Installation.here()
    assert len({before, there.code, here.code}) == 3


def test_workers_elsewhere_without_the_file_are_refused(folder: Path) -> None:
    elsewhere = Installation.here()
    cell_names("strategy", str(folder / "naive.py"))
    assert "lacks the plug-ins file:naive.py" in Installation.here().difference(elsewhere)


#: raises what is no Exception, and has no message
ODD = data(__file__)["ODD"]


def test_files_of_another_process_must_be_the_same_here(folder: Path) -> None:
    cell_names("strategy", str(folder / "naive.py"))
    there = loose_files.file_digests()
    loose_files.share_files(there)
    assert loose_files.loose_paths() == (folder / "naive.py",)
    (folder / "naive.py").write_text(STRATEGY + "\nCHANGED = 1\n")
    with pytest.raises(ValueError, match=r"naive.py is another file on .*; put the same file there"):
        loose_files.share_files(there)
    (folder / "naive.py").unlink()
    with pytest.raises(ValueError, match=r"naive.py is not on "):
        loose_files.share_files(there)


@tabled(__file__, "a_file_that_cannot_be_used")
def test_a_file_that_cannot_be_used(folder: Path, kind: str, name: str, message: str) -> None:
    holding = "class A(B): name = 'a'\nPRESETS = {}\n"  # what a file must have to be imported at all
    (folder / "broken.py").write_text(f"import spbench\nbrokn\n{holding}")
    (folder / "exits.py").write_text(f"import sys\nsys.exit(0)\n{holding}")
    (folder / "ends.py").write_text(f"import os\nos._exit(0)\n{holding}")
    (folder / "odd.py").write_text(ODD + holding)
    (folder / "train.py").write_text("class Set(Data):\n    size = 1\n\nraise RuntimeError('it was run')\n")
    (folder / "taken.py").write_text(STRATEGY.replace('"gathered_attention"', '"lasp"'))
    (folder.parent / "naive.py").write_text(STRATEGY)
    if name.startswith(".."):
        cell_names("strategy", "naive.py", folder)
    with pytest.raises(Exception, match=r"\S") as error, exits_refused():
        cell_names(kind, name, folder)  # type: ignore[arg-type]
    assert message in str(error.value)


ENDS = ["sys.exit(0)", "os._exit(0)", "raise type('Odd', (BaseException,), {})('odd')"]


@pytest.mark.parametrize(("number", "ends"), [*enumerate(ENDS)])
def test_a_strategy_that_ends_the_process_never_succeeds(
    folder: Path, number: int, ends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the command itself, and in a cell."""
    name = f"ending{number}"  # modules of one name would be one
    with_end = f"    def check(self, sites):\n        import os, sys; {ends}\n\n    def communication("
    text = STRATEGY.replace("gathered_attention", name).replace("    def communication(", with_end)
    (folder / f"{name}.py").write_text(text)
    line = 1 + text[: text.index("import os, sys;")].count("\n")
    command = [
        "verify",
        "--strategy",
        str(folder / f"{name}.py"),
        "--model",
        "bert-tiny",
        "--world-size",
        "2",
    ]
    assert exit_code(command) == 2
    assert f"{name}.py:{line}: " in capsys.readouterr().err
    (folder / "s.yaml").write_text(SCENARIO.replace("STRATEGIES", f"./{name}.py"))
    (reason,) = spbench.run(folder / "s.yaml", jobs=0, where=[("strategy", name)]).reason
    assert f"{name}.py:{line}: " in reason


def test_an_unknown_name_says_that_files_can_be_given() -> None:
    cell = {"model": "bert-tiny", "strategy": "naive", "batch": 1, "seq_len": 8}
    with pytest.raises(UserError, match=r"unknown strategy 'naive'.*or give the path of a .py file"):
        spbench.run(Cell.model_validate(cell), jobs=0)
