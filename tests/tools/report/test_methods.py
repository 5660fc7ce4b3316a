"""The heat maps of the best method, and the page of kept answers of `spbench advise`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from spbench.bench.measure.trust.bands import with_band
from spbench.bench.tools.report.best_methods import BY_BATCH, BY_LENGTH, best_drawing
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import Page
from spbench.bench.tools.report.pages.advice_page import kept, pages
from tests.terminal import ROOT


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
    drawing = best_drawing("best", "Best", cells, questions, along)
    assert drawing is not None
    return [dict(line) for line in drawing.table.rows]


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


def test_options_that_are_lists_are_compared_with_their_like() -> None:
    packed = {"documents": [7, 5]}
    found = lines(
        [
            cell("lasp", options=packed, tokens_per_s=100.0),
            cell("ulysses", options=packed, tokens_per_s=200.0),
            cell("ring_attention", options={"documents": [12]}, tokens_per_s=300.0),
        ]
    )
    assert [(f["best method"], f["compared with"]) for f in found] == [("Ulysses", "LASP")]


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


def test_the_heat_map_has_what_was_compared() -> None:
    cells = [
        cell("lasp", tokens_per_s=100.0),
        cell("ulysses", status="oom"),
        cell("single", tokens_per_s=2.0),
        cell("lasp", seq_len=1024, tokens_per_s=90.0),
    ]
    drawing = best_drawing("best", "Best", cells, BY_LENGTH[:1], "seq_len")
    assert drawing is not None
    ((title, svg),) = drawing.panels
    assert title == "fastest (tokens/s): BERT base on local, GPUs by sequence length"
    words = "batch: 1; compared with: No sequence parallelism; out of memory: Ulysses"
    assert f"<title>LASP: 100 tokens/s; {words}</title>" in svg
    assert "512" in svg
    assert [*drawing.legend] == ["LASP"]
    alone = best_drawing("best", "Best", cells[:1], BY_LENGTH[:1], "seq_len")
    assert alone is not None
    assert (len(alone.panels), len(alone.table.rows)) == (0, 1)


def test_no_cells_no_drawing() -> None:
    assert best_drawing("best", "Best", [], BY_LENGTH, "seq_len") is None


def test_a_model_of_fewer_layers_is_not_compared_with_a_whole_one() -> None:
    few = {"layers": 2, "softmax": "plain"}
    whole, part = cell("lasp", tokens_per_s=100.0), cell("ulysses", options=few, tokens_per_s=900.0)
    (found,) = lines([whole, part])
    assert (found["best method"], found["compared with"], found["sizes"]) == ("LASP", "", "")
    (found,) = lines([part, cell("lasp", options={"layers": 2}, tokens_per_s=800.0)])
    assert (found["best method"], found["compared with"], found["sizes"]) == ("Ulysses", "LASP", "layers 2")


# -- advice ----------------------------------------------------------------------------------------------

LINE = {
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "seq_len": 8192,
    "batch": 128,
    "tie": True,
    "strategy": "ulysses",
    "mesh": "sp8",
    "backend": "zero1",
    "step_time_s": 2.0,
    "compute_floor_s": 1.0,
    "links_floor_s": "",
    "peak_memory_bytes": 3 * 2**30,
}


def page_of(folder: Path, *lines: dict[str, object]) -> list[Page]:
    (folder / "advice").mkdir()
    with (folder / "advice" / "kept.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return [*pages(Gathered(folder, folder, None, [], []))]


def test_each_question_has_a_drawing_of_its_layouts(tmp_path: Path) -> None:
    other = {**LINE, "strategy": "single", "mesh": "dp8", "step_time_s": 2.1}
    (page,) = page_of(tmp_path, LINE, other, {**LINE, "gpus": 64, "tie": False})
    of_eight, of_many = page.parts["answers"]  # type: ignore[misc, union-attr]
    first, second = of_eight.table.rows
    assert (first["layout"], first["step s"], first["peak GiB"]) == ("Ulysses, sp8, ZeRO-1", 2.0, 3.0)
    assert first["links floor s"] is None
    alone = "No sequence parallelism, dp8, ZeRO-1"
    assert second["layout"] == alone
    assert f"a tie with {alone}" in of_eight.alt
    assert of_many.table.caption.startswith(
        "Llama-3 8B on 64 GPUs of dgx-h100, batch 128, sequence length 8K"
    )
    assert "a tie" not in of_many.alt
    ((_, svg),) = of_eight.panels
    assert svg.count("<rect") == 2
    assert "floor 1 s" in svg


def test_intervals_are_those_of_this_version(tmp_path: Path) -> None:
    """Of the kept answers too, whose file has none of its own."""
    priced_by = [{"work": "attention", "by": "another", "grade": "extrapolated", "share": 0.3}]
    rated = {"rates": "extrapolated", "bound": "attention", "priced_by": priced_by}
    old = {"step_time_low_s": 0.1, "step_time_high_s": 90.0}
    (page,) = page_of(tmp_path, {**LINE, **rated, **old})
    (drawing,) = page.parts["answers"]  # type: ignore[misc, union-attr]
    measured = with_band({"cell": LINE, "measurement": {"step_time_s": 2.0, **rated}})["measurement"]
    (row,) = drawing.table.rows
    assert (row["at least"], row["at most"]) == (measured["step_time_low_s"], measured["step_time_high_s"])
    committed = kept(ROOT / "results" / "advice")
    assert committed
    assert not {"step_time_low_s", "step_time_high_s"} & {name for lines in committed for name in lines[0]}


def test_without_answers_there_is_no_page(tmp_path: Path) -> None:
    assert [*pages(Gathered(tmp_path, tmp_path, None, [], []))] == []


def test_other_files_are_left_out(tmp_path: Path) -> None:
    assert page_of(tmp_path, {"name": "8b", "seconds": 54}) == []
