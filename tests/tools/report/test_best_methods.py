"""The heat map of the best method."""

from __future__ import annotations

from typing import Any

from spbench.bench.tools.report.best_methods import BY_BATCH, BY_LENGTH, best_chart
from spbench.bench.tools.report.gathered import CellResult


def cell(
    strategy: str,
    status: str = "ok",
    batch: int = 1,
    seq_len: int | None = 512,
    options: dict[str, Any] | None = None,
    **measured: Any,
) -> CellResult:
    fields = {
        "model": "bert-base",
        "strategy": strategy,
        "sizes": {"sp": 4},
        "batch": batch,
        "seq_len": seq_len,
        "cluster": "local",
        "model_options": options or {},
        "search": {"quantity": "seq_len"} if seq_len is None else None,
    }
    row = {"key": f"{strategy}{batch}", "cell": fields, "status": status, "measurement": measured}
    return CellResult("planted", "runs", {**row, "reason": ""})


def lines(cells: list[CellResult], along: str = "seq_len") -> list[dict[str, Any]]:
    questions = BY_LENGTH if along == "seq_len" else BY_BATCH
    chart = best_chart("best", "Best", cells, questions, along)
    assert chart is not None
    return [dict(line) for line in chart.table.rows]


def test_the_fastest_and_the_smallest_are_found() -> None:
    found = lines(
        [
            cell("lasp", tokens_per_s=100.0, peak_memory_bytes=3 * 2**30),
            cell("ulysses", tokens_per_s=200.0, peak_memory_bytes=4 * 2**30),
        ]
    )
    assert [(f["metric"], f["best method"], f["value"], f["second"]) for f in found] == [
        ("fastest", "Ulysses", 200.0, 100.0),
        ("smallest peak memory", "LASP", 3.0, 4.0),
    ]


def test_the_longest_is_the_answer_of_a_search() -> None:
    (found,) = lines(
        [cell("lasp", seq_len=None, answer=4096), cell("ulysses", seq_len=None, answer=1024)], along="batch"
    )
    assert (found["best method"], found["value"], found["batch"]) == ("LASP", 4096, 1)


def test_methods_are_compared_at_the_batch_that_most_have() -> None:
    (found,) = lines(
        [
            cell("lasp", batch=64, tokens_per_s=900.0),
            cell("lasp", batch=8, tokens_per_s=100.0),
            cell("ulysses", batch=8, tokens_per_s=200.0),
        ]
    )
    assert (found["best method"], found["batch"], found["compared with"]) == ("Ulysses", 8, "LASP")


def test_methods_without_memory_are_marked() -> None:
    (found,) = lines([cell("lasp", tokens_per_s=100.0), cell("ulysses", status="oom")])
    assert (found["best method"], found["out of memory"]) == ("LASP", "Ulysses")


def test_where_all_ran_out_there_is_no_best() -> None:
    found = lines([cell("ulysses", status="oom"), cell("lasp", seq_len=1024, tokens_per_s=1.0)])
    lost = [f for f in found if f["sequence length"] == 512]
    assert lost
    assert {(f["best method"], f["out of memory"]) for f in lost} == {(None, "Ulysses")}


def test_no_cells_no_chart() -> None:
    assert best_chart("best", "Best", [], BY_LENGTH, "seq_len") is None


def test_a_model_of_fewer_layers_is_not_compared_with_a_whole_one() -> None:
    few = {"layers": 2, "softmax": "plain"}
    whole, part = cell("lasp", tokens_per_s=100.0), cell("ulysses", options=few, tokens_per_s=900.0)
    (found,) = lines([whole, part])
    assert (found["best method"], found["compared with"], found["sizes"]) == ("LASP", "", "")
    (found,) = lines([part, cell("lasp", options={"layers": 2}, tokens_per_s=800.0)])
    assert (found["best method"], found["compared with"], found["sizes"]) == ("Ulysses", "LASP", "layers 2")
