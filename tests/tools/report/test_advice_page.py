"""The page of kept answers of `spbench advise`."""

from __future__ import annotations

import csv
from pathlib import Path

from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import Page
from spbench.bench.tools.report.pages.advice_page import pages

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


def test_each_question_has_a_chart_of_its_layouts(tmp_path: Path) -> None:
    other = {**LINE, "strategy": "single", "mesh": "dp8", "step_time_s": 2.1}
    (page,) = page_of(tmp_path, LINE, other, {**LINE, "gpus": 64, "tie": False})
    of_eight, of_many = page.values["charts"]
    first, second = of_eight.table.rows
    assert (first["layout"], first["step s"], first["peak GiB"]) == ("ulysses sp8, zero1", 2.0, 3.0)
    assert first["links floor s"] is None
    assert second["layout"] == "single dp8, zero1"
    assert "a tie with single dp8, zero1" in of_eight.alt
    assert of_many.caption.startswith("llama3-8b, 64 GPUs of dgx-h100, 128 sequences of 8192")
    assert "a tie" not in of_many.alt
    assert of_eight.spec["width"] == "container"  # as wide as the page, or a phone
    assert of_eight.spec["data"]["values"][0]["compute floor s"] == 1.0


def test_without_answers_there_is_no_page(tmp_path: Path) -> None:
    assert [*pages(Gathered(tmp_path, tmp_path, None, [], []))] == []


def test_other_files_are_left_out(tmp_path: Path) -> None:
    assert page_of(tmp_path, {"name": "8b", "seconds": 54}) == []
