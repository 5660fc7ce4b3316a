"""Files of earlier versions are read under today's names: rows, records, comparisons and cluster files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.row import finite, json_line, parse_row
from spbench.bench.tools.papers.comparison import read_comparisons
from spbench.bench.tools.papers.strategy_traces import LAYERS, read_trace

OLD: dict[str, Any] = {
    "bound": "links across nodes",
    "parts": {"products_s": 1.0, "attention_s": 2.0, "within_nodes_s": 3.0, "across_nodes_s": 4.0},
    "priced_by": [
        {"work": "all_to_all within a node", "by": "the datasheet", "grade": "substituted", "share": 0.5},
        {"work": "attention by cudnn", "by": "matrix products", "grade": "substituted", "share": 0.1},
        {"work": "bf16 matrix products", "by": "the datasheet's peak", "grade": "substituted", "share": 0.1},
    ],
}


def test_a_row_is_read_and_written_under_todays_names() -> None:
    old = {"key": "a", "cell": {}, "status": "ok", "measurement": OLD, "rounds": [OLD]}
    row = parse_row(json.dumps(old).encode())
    measured = finite(row)["measurement"]
    assert measured["bound"] == "inter-node links"
    assert measured["parts"] == {"matmul_s": 1, "attention_s": 2, "intra_node_s": 3, "inter_node_s": 4}
    assert [(each["work"], each["by"]) for each in measured["priced_by"]] == [
        ("all_to_all intra-node", "the datasheet"),
        ("attention by cudnn", "matmuls"),
        ("bf16 matmuls", "the datasheet's peak"),
    ]
    assert finite(row.rounds[0]) == measured
    assert parse_row(json_line(row).encode()) == row  # today's names stay as they are


@pytest.mark.parametrize("bound", ["products", "matmul"])
def test_a_comparison_has_todays_bound(bound: str, tmp_path: Path) -> None:
    path = tmp_path / "rsa.csv"
    path.write_text(f"table,quantity,published,rates,bound\na,step_time_s,1.5,fitted,{bound}\n")
    assert [each.bound for each in read_comparisons(path)] == ["matmul"]


def cluster_file(path: Path, *keys: str) -> str:
    """A cluster file with a rate of matmuls under each of these keys, and a measured one."""
    rates = "\n".join(f"  {key}: {{bf16: {{share: {{value: 0.5, source: made up}}}}}}" for key in keys)
    measured = "{operation: matrix product, size: a, precision: bf16, ranks: 1, seconds: 1.0}"
    path.write_text(f"extends: dgx-h100-datasheet\ndevice:\n{rates}\nmeasured:\n- {measured}\n")
    return str(path)


def test_a_cluster_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    old, new = (load_cluster(cluster_file(tmp_path / f"{key}.yaml", key)) for key in ("products", "matmul"))
    assert old.content == new.content
    assert old.device.matmul is not None
    assert old.device.matmul["bf16"].share.value == 0.5
    assert old.measured[0].operation == "matmul"


def test_a_cluster_file_with_both_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"device\.products"):
        load_cluster(cluster_file(tmp_path / "a.yaml", "products", "matmul"))


def test_committed_traces_of_strategies_have_todays_classes_of_work() -> None:
    """Those of any version: the report has a colour for each class."""
    folder = Path(__file__).parents[2] / "results" / "reproduction" / "strategies"
    (cell, *_) = [
        Cell.model_validate(row["cell"])
        for line in (folder / LAYERS / "cells.jsonl").read_text().splitlines()
        if (row := json.loads(line))["cell"]["strategy"] == "ulysses"
    ]
    trace = read_trace(folder, cell)
    assert trace is not None
    classes = {(event.get("args") or {}).get("class") for event in trace["traceEvents"]}
    assert classes - {None} == {"matmul", "attention", "memory-bound"}
