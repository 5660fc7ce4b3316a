"""Published tables: each row beside its cell, out of memory by status, and one line for each mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell
from spbench.bench.commands.result_table import comparison_table
from spbench.bench.config.scenario import Scenario, compare, load_scenario
from spbench.bench.config.select import Narrowing, declared_cells
from spbench.bench.errors import UserError
from spbench.bench.published.answers.tables import PublishedTable
from spbench.bench.published.comparison import Comparison, as_frame
from spbench.bench.published.files import published_rows
from spbench.bench.sweep.results import Row
from spbench.bench.yaml_files import packaged

GIB = 2**30

PUBLISHED = """ranks,sequence,how,memory_gib,speed,status
1,512,Megatron,2,100,ok
4,512,Megatron,,,oom
1,512,Ring,4,,ok
4,512,Ring,8,200.5,ok
"""

SCENARIO: dict[str, Any] = {
    "title": "A table",
    "defaults": {"model": "bert-tiny", "batch": 4, "seq_len": 512, "cluster": "piz-daint-p100"},
    "groups": [
        {"strategy": "tensor_parallel", "sizes": {"tp": [1, 4]}},
        {"strategy": "ring_self_attention", "sizes": {"sp": [1, 4]}},
        {"strategy": "ring_self_attention", "sizes": {"sp": 4}, "batch": 5},
    ],
    "tables": [
        {
            "table": "t1",
            "published": {"file": "t1.csv"},
            "cells": {"batch": 4},
            "match": {"ranks": "parallel", "sequence": "seq_len", "how": "strategy"},
            "names": {"how": {"Megatron": "tensor_parallel", "Ring": "ring_self_attention"}},
            "status": "status",
            "quantities": {
                "memory_gib": {"field": "peak_memory_bytes", "unit": GIB},
                "speed": {"field": "tokens_per_s"},
            },
            "note": "a note",
        }
    ],
}


def written(folder: Path, content: dict[str, Any] = SCENARIO, published: str = PUBLISHED) -> str:
    (folder / "t1.csv").write_text(published)
    (folder / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return str(folder / "s.yaml")


def changed(**changes: Any) -> dict[str, Any]:
    """SCENARIO with keys of its table replaced."""
    content = json.loads(json.dumps(SCENARIO))
    content["tables"][0] |= changes
    return content


def row(cell: Cell, status: str = "ok", reason: str = "", **measured: float) -> Row:
    return {"key": cell.key, "cell": {}, "status": status, "reason": reason, "measurement": measured}


def compared(scenario: Scenario, *statuses: str, **measured: float) -> list[Comparison]:
    cells = declared_cells(scenario, Narrowing())
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
    cells = declared_cells(scenario, Narrowing())
    assert [c.cell for c in found[:4]] == [cell.key for cell in cells[:4]] == [c.numerator for c in found[:4]]
    assert [c.strategy for c in found[1:3]] == ["tensor_parallel", "ring_self_attention"]


def test_options_are_told_which_the_name_of_a_cell_hides(tmp_path: Path) -> None:
    header, *lines = PUBLISHED.strip().split("\n")
    published = "\n".join([header + ",data parallel", *(line + ",plain" for line in lines)])
    match = {**SCENARIO["tables"][0]["match"], "data parallel": "training.backend"}
    names = {**SCENARIO["tables"][0]["names"], "data parallel": {"plain": "legacy_ddp"}}
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


def test_what_a_paper_shows_without_a_number(tmp_path: Path) -> None:
    published = PUBLISHED.replace("4,512,Ring,8,200.5,ok", "4,512,Ring,,,unstated")
    scenario = load_scenario(written(tmp_path, published=published))
    cells = declared_cells(scenario, Narrowing())
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


def test_each_variant_engine_and_cluster_has_its_own(tmp_path: Path) -> None:
    content = {**SCENARIO, "variants": {"a": {"precision": "fp16"}, "b": {}}}
    scenario = load_scenario(written(tmp_path, content))
    cells = declared_cells(scenario, Narrowing(variant="all", clusters=["local", "piz-daint-p100"]))
    found = compare(scenario, cells, {})
    assert len(found) == 7 * 2 * 2
    assert [c.variant for c in found] == ["a"] * 14 + ["b"] * 14
    assert len({(c.claim, c.cell) for c in found}) == len(found)


TABLE = SCENARIO["tables"][0]
WRONG = [
    (changed(match={"rank": "parallel"}), "match.rank: t1.csv has no column 'rank'; did you mean 'ranks'?"),
    (changed(status="state"), "status: t1.csv has no column 'state'; did you mean 'status'?"),
    (changed(where={"hwo": ["x"]}), "where.hwo: t1.csv has no column 'hwo'; did you mean 'how'?"),
    (changed(names={"who": {}}), "names.who: t1.csv has no column 'who'"),
    (changed(match={"ranks": "paralel"}), "match.ranks: unknown field 'paralel'; did you mean 'parallel'?"),
    (changed(cells={"btach": 4}), "cells.btach: unknown field 'btach'; did you mean 'batch'?"),
    (changed(match={}), "match: is empty; give at least one"),
    (changed(quantities={"memory": {"field": "answer"}}), "quantities.memory: t1.csv has no column 'memory'"),
    (changed(quantities={"speed": {"field": "tokens"}}), "quantities.speed.field: unknown quantity 'tokens'"),
    (
        changed(quantities={"speed": {"field": "answer", "unit": 0}}),
        "quantities.speed.unit: must be greater than 0, not 0",
    ),
    (changed(quantities={"how": {"field": "answer"}}), "row 1 of t1.csv has no number there"),
    (changed(status="how"), "status: row 1 of t1.csv says 'Megatron'; it must be ok, oom or unstated"),
    (
        changed(calibrated={"speed": [{"ranks": 1}]}),
        "calibrated: unknown key (known: table, published, match",
    ),
    (
        changed(names={}),
        "no group declares the cell of row 1 of t1.csv (ranks 1, sequence 512, how Megatron)",
    ),
    (changed(cells={"batch": 5}), "match: no group declares the cell of row 1"),
    (changed(cells={}), "match: row 4 of t1.csv (ranks 4, sequence 512, how Ring) is 2 cells, such as "),
    (changed(match={"how": "strategy"}), "is 2 cells, such as "),
    (changed(where={"how": ["Rign"]}), "where: no row of t1.csv is left"),
    (changed(published={"file": "t2.csv"}), "published: cannot read published file t2.csv: No such file"),
    (changed(publishd={}), "publishd: unknown key; did you mean 'published'?"),
    ({**SCENARIO, "tables": [TABLE, TABLE]}, "tables[1].table: 't1' is there already; leave one out"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[message for _, message in WRONG])
def test_mistakes_are_one_line(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        load_scenario(path)
    assert str(caught.value).startswith(f"{path}: tables[")
    assert message in str(caught.value)


def test_two_rows_of_one_cell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rows 4 and 5 both speak of bert-tiny/ring_self_attention/sp4/"):
        load_scenario(written(tmp_path, published=PUBLISHED + "4,512,Ring,9,1,ok\n"))


def test_short_rows_are_blank(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1\n2,3\n")
    assert published_rows("t.csv", tmp_path)[1:] == (["a", "b"], [{"a": "1", "b": ""}, {"a": "2", "b": "3"}])


def test_tables_of_the_package_are_whole() -> None:
    """Every packaged scenario loads, so that each of its published rows has a cell."""
    tables = {name: load_scenario(name).answers(PublishedTable) for name in packaged("spbench.scenarios")}
    for name in ("rsa_table4", "rsa_throughput", "rsa_pipeline"):
        assert [table.table for table in tables[name]] == [name.replace("_", "-")]


def test_the_table_of_the_rsa_paper(tmp_path: Path) -> None:
    """All 16 rows of PublishedTable 4, both weak scalings, each with a cell of its own."""
    shapes = [(1, 64, 512), (2, 128, 512), (4, 256, 512), (8, 512, 512)]
    shapes += [(1, 64, 256), (2, 64, 512), (4, 64, 1024), (8, 64, 2048)]
    content = {
        "title": "PublishedTable 4",
        "paper": "rsa",
        "defaults": {"model": "bert-large", "cluster": "piz-daint-p100", "precision": "fp16"},
        "groups": [
            {"strategy": strategy, "sizes": {axis: n}, "batch": batch, "seq_len": length}
            for strategy, axis in (("tensor_parallel", "tp"), ("ring_self_attention", "sp"))
            for n, batch, length in shapes
        ],
        "tables": [
            {
                "table": "rsa-table4",
                "published": {"file": "rsa_table4.csv"},
                "match": {
                    "method": "strategy",
                    "batch_size": "batch",
                    "seq_len": "seq_len",
                    "parallel_size": "parallel",
                },
                "status": "status",
                "quantities": {
                    "memory_mb": {"field": "peak_memory_bytes", "unit": 2**20},
                    "throughput_tokens_per_s": {"field": "tokens_per_s"},
                },
            }
        ],
    }
    scenario = load_scenario(written(tmp_path, content))
    cells = declared_cells(scenario, Narrowing())
    found = compare(scenario, cells, {cell.key: row(cell, peak_memory_bytes=2**33) for cell in cells})
    assert len(found) == 32
    assert [c.status_published for c in found].count("oom") == 2
    memory = [c for c in found if c.quantity == "memory_mb"]
    assert memory[0].relative_error == pytest.approx(8192 / 8477.28 - 1)
