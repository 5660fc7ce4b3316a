"""The page of kept answers of `spbench advise`.

The verdict on published numbers: planted records, one for each part of the rule.
"""

import csv
from pathlib import Path
from typing import Any

from spbench.bench.measure.trust.bands import with_band
from spbench.bench.tools.papers.comparison import frame_of
from spbench.bench.tools.papers.paper_findings import counts, verdict_on
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import Page, most_misses
from spbench.bench.tools.report.pages.advice_page import kept, pages
from tests.grid import data, tabled
from tests.terminal import ROOT

# -- advice ----------------------------------------------------------------------------------------------

LINE = data(__file__)["LINE"]


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
    of_eight, of_many = page.values["answers"]
    first, second = of_eight.rows
    assert (first["layout"], first["step s"], first["peak GiB"]) == ("Ulysses, sp8, ZeRO-1", 2.0, 3.0)
    assert first["links floor s"] is None
    alone = "No sequence parallelism, dp8, ZeRO-1"
    assert second["layout"] == alone
    assert f"a tie with {alone}" in of_eight.drawn.alt
    assert of_many.caption.startswith("Llama-3 8B on 64 GPUs of dgx-h100, batch 128, sequence length 8K")
    assert "a tie" not in of_many.drawn.alt
    svg = of_eight.drawn.content.decode()
    assert all(name in svg for name in (">Ulysses<", ">sp8, ZeRO-1<", ">No sequence parallelism<"))


def test_intervals_are_those_of_this_version(tmp_path: Path) -> None:
    """Of the kept answers too, whose file has none of its own."""
    priced_by = [{"work": "attention", "by": "another", "grade": "extrapolated", "share": 0.3}]
    rated = {"rates": "extrapolated", "bound": "attention", "priced_by": priced_by}
    old = {"step_time_low_s": 0.1, "step_time_high_s": 90.0}
    (page,) = page_of(tmp_path, {**LINE, **rated, **old})
    (drawing,) = page.values["answers"]
    measured = with_band({"cell": LINE, "measurement": {"step_time_s": 2.0, **rated}})["measurement"]
    (row,) = drawing.rows
    assert (row["at least"], row["at most"]) == (measured["step_time_low_s"], measured["step_time_high_s"])
    committed = kept(ROOT / "results" / "advice")
    assert committed
    assert not {"step_time_low_s", "step_time_high_s"} & {name for lines in committed for name in lines[0]}


def test_without_answers_there_is_no_page(tmp_path: Path) -> None:
    assert [*pages(Gathered(tmp_path, tmp_path, None, [], []))] == []


def test_other_files_are_left_out(tmp_path: Path) -> None:
    assert page_of(tmp_path, {"name": "8b", "seconds": 54}) == []


def record(
    cell: str,
    error: float | None = 0.0,
    role: str = "predicted",
    statuses: tuple[str, str] = ("ok", "ok"),
    scenario: str = "planted",
    **numbers: float,
) -> dict[str, Any]:
    published = None if statuses[0] == "oom" else 100.0
    ours = None if error is None or published is None else published * (1 + error)
    return {
        "table": "planted-table" if role != "formula" else "planted-formula",
        "cell": cell,
        "quantity": "memory",
        "published": published,
        "reproduced": ours,
        "relative_error": error if ours is not None else None,
        "status_published": statuses[0] if role != "formula" else "",
        "status_reproduced": statuses[1] if role != "formula" else "",
        "role": role,
        "scenario": scenario,
        "variant": "",
        "source": cell.split("@")[0],
        **numbers,
    }


@tabled(__file__, "the_word_of_planted_records")
def test_the_word_of_planted_records(records: list[dict[str, Any]], word: str) -> None:
    assert verdict_on(frame_of([record(**each) for each in records])).word == word


def test_a_number_that_is_compared_twice_is_counted_once() -> None:
    twice = frame_of([record("a"), record("a", 0.5)])
    assert (verdict_on(twice).judged, verdict_on(twice).met) == (1, 1)


def test_the_sentence_has_the_numbers_and_the_scenario_with_the_most_misses() -> None:
    lines = [record("a"), record("b", 0.3, scenario="bad"), record("c", -0.5, scenario="bad")]
    records = frame_of(lines)
    assert counts(verdict_on(records)) == "1 of 3 numbers are met. The median error is 30.0%, the worst 50%"
    assert most_misses(records) == ("bad", "2 of 2")
    assert most_misses(records[:1]) is None
    assert counts(verdict_on(records[:0])) == "nothing was judged"


def test_the_sentence_leaves_no_worst_error_out() -> None:
    """Closed forms have no part in the median, but are named where they are off."""
    lines = [record("a"), record("f@1", role="formula"), record("f@2", 8.0, role="formula")]
    off = frame_of(lines)
    differ = "Errors exclude formulas of bytes; the worst formula is 800% off"
    text = f"1 of 2 numbers are met. The median error is 0.0%, the worst 0%. {differ}"
    assert counts(verdict_on(off)) == text
    assert counts(verdict_on(off[2:])) == f"0 of 1 numbers are met. {differ}"
    assert "closed" not in counts(verdict_on(off[:2]))
