"""Published tables: each row beside its cell, out of memory by status, and one line for each mistake.
Published formulas: what they may hold, and that no formula ends in anything but a number or a line. The
tables of pages: errors by who measured, errors of all results, and the ladder of longest sequences.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell
from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.row import Row
from spbench.bench.tools.papers import validation
from spbench.bench.tools.papers.answer import compare, load_scenario
from spbench.bench.tools.papers.comparison import Comparison, as_frame, frame_of, joined, read_comparisons
from spbench.bench.tools.papers.paper_findings import comparison_table
from spbench.bench.tools.papers.sources import MEASURED, evaluate, measured_sources, papers, published_file
from tests.grid import data, tabled

GIB = 2**30

PUBLISHED = data(__file__)["PUBLISHED"]

SCENARIO: dict[str, Any] = data(__file__)["SCENARIO"]
TABLE = SCENARIO["tables"][0]


def written(folder: Path, content: dict[str, Any] = SCENARIO, published: str = PUBLISHED) -> str:
    (folder / "t1.csv").write_text(published)
    (folder / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return str(folder / "s.yaml")


def changed(**changes: Any) -> dict[str, Any]:
    """SCENARIO with keys of its table replaced."""
    return {**SCENARIO, "tables": [{**TABLE, **changes}]}


def row(cell: Cell, status: str = "ok", reason: str = "", **measured: float) -> Row:
    return {"key": cell.key, "cell": {}, "status": status, "reason": reason, "measurement": measured}


def compared(scenario: Scenario, *statuses: str, **measured: float) -> list[Comparison]:
    cells = Narrowing().declared(scenario)
    rows = {
        cell.key: row(cell, status, **measured)
        for cell, status in zip(cells, statuses, strict=False)
        if status
    }
    return compare(scenario, cells, rows)


def test_each_number_has_its_row(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path))
    found = compared(scenario, "ok", "oom", "ok", "ok", peak_memory_bytes=2 * GIB, tokens_per_s=110)
    # the third row publishes no speed, so there is nothing to compare
    assert [(c.quantity, c.published, c.reproduced, c.role) for c in found] == [
        ("memory_gib", 2.0, 2.0, "predicted"),
        ("memory_gib", None, 2.0, "predicted"),
        ("memory_gib", 4.0, 2.0, "predicted"),
        ("memory_gib", 8.0, 2.0, "predicted"),
        ("speed", 100.0, 110.0, "predicted"),
        ("speed", None, 110.0, "predicted"),
        ("speed", 200.5, 110.0, "predicted"),
    ]
    assert [c.relative_error for c in found[:3]] == [0.0, None, -0.5]
    assert found[4].relative_error == pytest.approx(0.1)
    assert {(c.table, c.variant, c.note) for c in found} == {("t1", "", "a note")}
    assert found[0].claim == "t1: memory_gib, ranks 1, sequence 512, how Megatron"
    assert len({c.claim for c in found}) == len(found)
    cells = Narrowing().declared(scenario)
    assert [c.cell for c in found[:4]] == [cell.key for cell in cells[:4]] == [c.numerator for c in found[:4]]
    assert [c.strategy for c in found[1:3]] == ["tensor_parallel", "ring_self_attention"]


def test_options_are_told_which_the_name_of_a_cell_hides(tmp_path: Path) -> None:
    header, *lines = PUBLISHED.strip().split("\n")
    published = "\n".join([header + ",data parallel", *(line + ",plain" for line in lines)])
    match = {**TABLE["match"], "data parallel": "training.backend"}
    names = {**TABLE["names"], "data parallel": {"plain": "legacy_ddp"}}
    scenario = load_scenario(written(tmp_path, changed(match=match, names=names), published))
    assert compared(scenario, "ok", peak_memory_bytes=GIB)[0].note == "data parallel plain; a note"


def test_out_of_memory_is_compared_by_status(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path))
    found = compared(scenario, "oom", "oom", "ok", "", peak_memory_bytes=2 * GIB)
    memory = found[:4]
    assert [(c.status_published, c.status_reproduced) for c in memory] == [
        *[("ok", "oom"), ("oom", "oom"), ("ok", "ok"), ("ok", "")]
    ]
    assert [c.note for c in memory] == [
        *["a note; published ok, ours oom", "a note", "a note", "a note; was not run"]
    ]
    assert memory[1].relative_error is None
    assert found[4].note == "a note; published ok, ours oom"
    lines = comparison_table(memory).lines
    assert [(line["published"], line["ours"]) for line in lines] == [
        *[("2", "oom (2)"), ("oom", "oom (2)"), ("4", "2"), ("8", None)]
    ]
    failed = compared(scenario, "failed")[0]
    assert (failed.reproduced, failed.status_reproduced) == (None, "failed")


def test_a_terminal_counts_closed_forms_that_hold(tmp_path: Path) -> None:
    first = compared(load_scenario(written(tmp_path)), "ok", peak_memory_bytes=2 * GIB)[0]
    form = replace(first, quantity="sent_bytes", published=3.0, reproduced=3.0)
    table = comparison_table([first, form, replace(form, reproduced=4.0), replace(form, reproduced=None)])
    assert [*table.folded] == [1]


def test_what_a_paper_shows_without_a_number(tmp_path: Path) -> None:
    published = PUBLISHED.replace("4,512,Ring,8,200.5,ok", "4,512,Ring,,,unstated")
    scenario = load_scenario(written(tmp_path, published=published))
    cells = Narrowing().declared(scenario)
    for status, note in (("ok", "a note"), ("unsupported", "a note; unsupported: a reason")):
        reason = "a reason" if status != "ok" else ""
        rows = {cells[3].key: row(cells[3], status, reason, peak_memory_bytes=GIB)}
        unstated = compare(scenario, cells, rows)[3]
        assert (unstated.published, unstated.reproduced, unstated.relative_error) == (None, 1.0, None)
        assert (unstated.status_published, unstated.status_reproduced) == ("unstated", status)
        assert (unstated.role, unstated.note) == ("predicted", note)
        assert comparison_table([unstated]).lines[0]["published"] == "unstated"
    assert compare(scenario, cells, {})[3].note == "a note; was not run"


def test_a_number_we_lack_is_said(tmp_path: Path) -> None:
    found = compared(load_scenario(written(tmp_path)), "ok", peak_memory_bytes=GIB)
    assert found[4].note == "a note; has no tokens_per_s"
    frame = as_frame(found)
    assert frame.relative_error.isna().sum() == len(found) - 1


def test_rows_can_be_chosen(tmp_path: Path) -> None:
    content = changed(where={"how": ["Ring"], "ranks": [4, 8]})
    found = compared(load_scenario(written(tmp_path, content)), "ok", "ok", "ok", "ok")
    assert [(c.quantity, c.published) for c in found] == [("memory_gib", 8.0), ("speed", 200.5)]


@tabled(__file__, "mistakes_are_one_line")
def test_mistakes_are_one_line(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = written(tmp_path, changed(**{key: value}))
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        load_scenario(path)
    assert str(caught.value).startswith(f"{path}: tables[")
    assert message in str(caught.value)


def test_a_name_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tables\[1\].table: 't1' is there already; leave one out"):
        load_scenario(written(tmp_path, {**SCENARIO, "tables": [TABLE, TABLE]}))


def test_two_rows_of_one_cell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rows 4 and 5 both speak of bert-tiny/ring_self_attention/sp4/"):
        load_scenario(written(tmp_path, published=PUBLISHED + "4,512,Ring,9,1,ok\n"))


def test_short_rows_are_blank(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1\n2,3\n")
    assert published_file("t.csv", tmp_path)[1:] == (["a", "b"], [{"a": "1", "b": ""}, {"a": "2", "b": "3"}])


SIZES = {"B": 3, "L": 4096, "H": 1024, "N": 4}


def test_values() -> None:
    assert evaluate("2*(N-1)*B*L/N", SIZES) == 2 * 3 * 3 * 4096 / 4
    assert evaluate("H**2", SIZES) == 1024**2


@tabled(__file__, "mistakes_are_user_errors_at_once")
def test_mistakes_are_user_errors_at_once(formula: str, times: int, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        evaluate(formula * times, SIZES)
    assert message in str(caught.value)
    assert time.monotonic() - start < 5


def written_formula(folder: Path, formula: str, **changes: object) -> str:
    (folder / "f.csv").write_text(f"claim,published\nf,{formula}\n")
    claim = {
        "claim": "f",
        "published": {"file": "f.csv"},
        "cells": {"strategy": "ring_self_attention", "model_options": {"layers": 2}},
        "less": {"layers": 1},
        "phases": ["forward"],
    }
    content = {
        "title": "A formula",
        "defaults": {"model": "bert-tiny", "batch": 4, "seq_len": 512, "sizes": {"sp": 2}},
        "groups": [{"strategy": "ring_self_attention", "model_options": {"layers": n}} for n in (2, 1)],
        "formulas": [claim | changes],
    }
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_formula_that_overflows_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written_formula(tmp_path, "L**H**H")
    assert exit_code(["run", "--scenario", path, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "s.yaml: formulas[0].published: at bert-tiny/ring_self_attention/sp2/b4/L512" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@tabled(__file__, "mistakes_name_the_key")
def test_mistakes_name_the_key(
    tmp_path: Path, formula: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_scenario(written_formula(tmp_path, formula, **changes))
    assert message in str(caught.value)


def test_a_search_has_no_sizes(tmp_path: Path) -> None:
    path = Path(written_formula(tmp_path, "B"))
    content = yaml.safe_load(path.read_text())
    content["defaults"] |= {"batch": None, "search": {"quantity": "batch"}}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"formulas\[0\]\.cells: bert-tiny/\S* searches"):
        load_scenario(str(path))


ROOT = Path(__file__).parents[3]
FILES = ROOT / "results" / "reproduction"
B200 = "megatron_b200_llama3.csv"


def record(
    source: str, quantity: str, error: float | None, role: str = "predicted", **other: Any
) -> dict[str, Any]:
    """A line of measured.csv, of a cell and row of its own unless given."""
    return {
        "table": f"t: {source}",
        "cell": source,
        "quantity": quantity,
        "published": 10.0,
        "reproduced": None if error is None else 10 * (1 + error),
        "relative_error": error,
        "status_published": "ok",
        "status_reproduced": "ok",
        "role": role,
        "source": source,
        **other,
    }


def test_errors_are_counted_by_source_and_quantity() -> None:
    records = [
        record(f"{B200}:1:peak:0", "peak_memory_gib", 0.001, "inferred"),
        record(f"{B200}:1:peak:1", "peak_memory_gib", -0.004, "inferred"),
        record(f"{B200}:2:peak:0", "peak_memory_gib", None, "inferred"),
        record(f"{B200}:2:real_ms", "step_time_ms", -0.05),
        # the same number in a second variant counts once
        record(f"{B200}:2:real_ms", "step_time_ms", 0.5),
        record("megatron_lm_goldens.csv:4:iter_s", "step_time_ms", 0.2, "calibrated"),
    ]
    goldens, memory, time, *others = validation.validation_lines(frame_of(records))
    assert list(goldens.values()) == [
        *("Megatron-LM's functional tests, 8 A100, H100 or GB200", "step time", 1),
        *("20.0%", "20.0%", "1 calibrated", ""),
    ]
    assert list(memory.values())[1:6] == ["peak memory", 2, "0.25%", "0.4%", "3 inferred"]
    assert list(time.values())[1:6] == ["step time", 1, "5.0%", "5.0%", "1 predicted"]
    assert memory["other predictors"] == "SimuMax 0.31%, worst 0.42%"
    assert time["other predictors"] == "SimuMax 4.6%, worst 11.4%"
    assert [(*line.values(),)[1:] for line in others] == [
        ("peak memory", "", "", "", "", "SimuMax, as it states: mean 0.46%, worst 1.4%"),
        ("step time", "", "", "", "", "SimuMax, as it states: mean 5.6%, worst 13.5%"),
        ("step time", "", "", "", "", "Phantora, as it states: mean 3% to 7%"),
        ("step time", "", "", "", "", "vTrain, as it states: mean 14.7%"),
    ]
    line, *_ = validation.validation_lines(frame_of([record(f"{B200}:2:real_ms", "step_time_ms", None)]))
    assert list(line.values())[1:6] == ["step time", 0, "", "", "1 predicted"]


def test_what_simumax_says_of_the_same_rows_is_computed() -> None:
    others = published_file(validation.PREDICTORS_FILE).rows
    memory, time = (validation.predictor_errors(other) for other in others if other["file"] == B200)
    assert len(time) == len(memory) == 12
    # 828.76 ms for 843.0, 66.44 GiB for 66.55
    assert time[0] == pytest.approx(1 - 828.76 / 843.0)
    assert memory[0] == pytest.approx(1 - 66.44 / 66.55)


def test_every_file_of_measurements_has_its_source() -> None:
    files = {path.name for path in (ROOT / "results" / "measured").glob("*_*.csv")} - {"other_predictors.csv"}
    assert files == {source.file for source in measured_sources()}
    readme = (ROOT / "results" / "measured" / "README.md").read_text()
    for source in measured_sources():
        assert source.commit in readme
        _, columns, rows = published_file(source.file)
        assert rows
        about = readme.partition(f"## {source.file}")[2].partition("\n## ")[0]
        assert [name for name in columns if name not in about] == []
    assert MEASURED in papers()


# -- how far to trust a number -------------------------------------------------------------------------------


def test_formulas_by_a_papers_convention_are_not_counted_as_sent_bytes() -> None:
    """LASP's Table 1 counts other methods by a convention of its own, and is 800% off."""
    (line,) = (line for line in validation.trust_lines(FILES) if line["quantity"].startswith("bytes sent"))
    assert (line["worst"], line["role"]) == ("0%", f"{line['numbers']} formula")
    records = joined(read_comparisons(FILES / f"{paper}.csv") for paper in ("rsa", "lasp", "dsp"))
    assert 0 < line["numbers"] < (records["role"] == "formula").sum()


# -- the ladder ----------------------------------------------------------------------------------------------

FIELD = FILES / "field.csv"
ALST = {"quantity": "tokens", "published": 1.1e6, "reproduced": 1179648.0}


def price(name: str, ratio: float | None) -> dict[str, Any]:
    return {"table": f"{name}: ulysses sp8", "quantity": "ratio", "reproduced": ratio}


def test_a_line_for_each_rung_with_what_its_switch_costs() -> None:
    prices = [
        price("H100, gpus 8, loss + Ulysses over loss, 8 x 128K", 1.0137),
        price("H100, gpus 8, loss + Ulysses over loss, 1M", 0.995),
        price("H100, gpus 8, loss + Ulysses over loss, 2M", None),
        price("H100, gpus 1, all over none, 32K", 1.81),
    ]
    tables = ("alst: H100, gpus 8, loss", "alst: H100, gpus 8, loss + Ulysses", "other: H100, gpus 8, loss")
    assert (
        validation.ladder_lines(frame_of([*prices, *({**ALST, "table": table} for table in tables)]))
        == data(__file__)["RUNGS"]
    )


def test_every_price_of_the_scenario_stands_in_the_table() -> None:
    """A ratio whose name is no rung's would be left out."""
    records = read_comparisons(FIELD).query("scenario == 'max_seqlen_today'")
    ratios = records[records["quantity"] == "ratio"]
    shown = [line["step"] for line in validation.ladder_lines(records)]
    assert len(ratios) == sum(text.count("%") for text in shown) == 8
