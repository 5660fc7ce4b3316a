"""Published times beside ours as observations of the error model, and the table of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.tools.papers.comparison import write_csv
from spbench.bench.tools.papers.document import write_part
from spbench.bench.tools.papers.paper_findings import RECORDS
from spbench.bench.tools.papers.past_errors import counted_times, log_error, observations, time_lines


def record(source: str = "usp_end_to_end.csv:1:step_ms", **changes: Any) -> dict[str, Any]:
    numbers = {"published": 100.0, "reproduced": 110.0, "relative_error": 0.1}
    texts = {"quantity": "step_time_ms", "role": "predicted", "rates": "sourced", "bound": "products"}
    blank = dict.fromkeys(RECORDS, "")
    return {**blank, "table": "t: a", "strategy": "ulysses", **numbers, **texts, "source": source, **changes}


def test_errors_are_of_times_whatever_was_published() -> None:
    assert log_error(record()) == pytest.approx(math.log(1.1))
    rate = record(quantity="throughput_tokens_per_s")
    assert log_error(rate) == pytest.approx(-math.log(1.1))


def test_times_to_which_nothing_was_fitted_count_once(tmp_path: Path) -> None:
    from pandas import DataFrame

    lines = [
        record(cell="a"),
        record(cell="b", reproduced=90.0),  # another variant of the same number
        record("x.csv:2:step_ms", cell="c", role="inferred"),
        record("x.csv:3:step_ms", cell="d", role="calibrated"),
        record("x.csv:4:peak", cell="e", quantity="peak_memory_gib"),
        record("x.csv:5:step_ms", cell="f", reproduced=None),
        record("x.csv:6:step_ms", cell="g", bound="", rates=""),
    ]
    path = write_csv(DataFrame(lines, columns=list(RECORDS)), tmp_path / "field.csv")
    assert [each["cell"] for each in counted_times([path])] == ["a", "c"]
    # the same number on a datasheet is another time
    assert len(counted_times([path, path])) == 4


def test_files_of_before_do_not_say_what_times_rest_on(tmp_path: Path) -> None:
    path = tmp_path / "field.csv"
    path.write_text("table,published\nt,1\n")
    with pytest.raises(UserError, match="no column 'rates'"):
        counted_times([path])


def test_sources_are_who_measured() -> None:
    files = ("usp_end_to_end.csv:1:step_ms", "lasp_speed.csv:1:x", "lasp_scalability.csv:1:y")
    found = observations([record(source) for source in files], {})
    assert [o.source for o in found] == ["USP's authors with Megatron-LM", "LASP", "LASP"]
    assert {o.alike for o in found} == {""}


def test_each_source_has_a_line_with_its_errors_order_and_coverage() -> None:
    split = [
        Cell(model="bert-tiny", strategy="ulysses", sizes=sizes, batch=1, seq_len=64)
        for sizes in ({"sp": 4}, {"sp": 2, "cp": 2})
    ]
    records = [
        record(cell=split[0].key, published=100.0, reproduced=110.0),
        record("usp_end_to_end.csv:2:step_ms", cell=split[1].key, published=120.0, reproduced=100.0),
        record("upipe.csv:1:step", published=100.0, reproduced=101.0),
        record("rsa_table4.csv:1:x", published=100.0, reproduced=200.0, rates="fitted"),
    ]
    usp, upipe, sourced, rsa, fitted, whole = time_lines(records, {cell.key: cell for cell in split})
    assert (usp["times"], usp["median error"], usp["worst"]) == (2, "13.3%", "16.7%")
    assert (usp["runs split"], usp["tau"], usp["our best from the best"]) == (1, "-1.00", "20.0%")
    assert usp["within 80% intervals"] == "0 of 2"  # of 1%, which UPipe's errs
    assert (upipe["times"], upipe["tau"], upipe["within 80% intervals"]) == (1, "", "1 of 1")
    assert (sourced["times"], sourced["within 80% intervals"]) == (3, "50%")
    assert (rsa["rates"], rsa["bias"], rsa["within 80% intervals"]) == ("fitted", "+100.0%", "0 of 1")
    assert (fitted["within 80% intervals"], whole["within 80% intervals"]) == ("0%", "33%")


def test_a_part_of_a_document_is_written_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("by hand\n<!-- spbench reproduce bands: times -->\nold\n<!-- end -->\nmore\n")
    write_part(page, "bands", "times", "new\n")
    assert page.read_text() == "by hand\n<!-- spbench reproduce bands: times -->\nnew\n<!-- end -->\nmore\n"
    with pytest.raises(UserError, match="has no part for other: add <!-- spbench reproduce bands: other -->"):
        write_part(page, "bands", "other", "new\n")
