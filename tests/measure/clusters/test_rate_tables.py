"""Tables of measured times: calls on measured ones, between two and beyond; packaged files and errors."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import cluster_names, load_cluster
from spbench.bench.measure.clusters.rate_tables import (
    RateTable,
    attention_by_length,
    attention_table,
    collective_tables,
    matmul_table,
    square_matmuls,
    table_names,
)

ERRORS = Path(__file__).parents[3] / "results" / "reproduction" / "interpolation.csv"


def test_a_measured_call_takes_what_it_took() -> None:
    table = matmul_table("h200_sxm-matmul")
    assert table.work / table.rates(table.sizes) == pytest.approx(table.seconds)


def test_between_calls_rates_are_straight_in_logarithms_and_beyond_them_those_of_the_edge() -> None:
    table = RateTable(np.array([[1.0], [4.0]]), np.array([1.0, 1.0]), np.array([1.0, 16.0]))
    assert table.rates(np.array([[2.0], [1.0], [0.5], [8.0]])) == pytest.approx([4.0, 1.0, 1.0, 16.0])
    assert table.covers(np.array([[2.0], [0.5], [8.0]])).tolist() == [True, False, False]


def test_a_place_that_was_not_measured_has_the_rate_of_the_nearest() -> None:
    corners = np.array([[1.0, 1.0], [1.0, 4.0], [2.0, 1.0]])
    table = RateTable(corners, np.ones(3), np.array([1.0, 2.0, 8.0]))
    assert table.rates(np.array([[2.0, 4.0]])) == pytest.approx([2.0])  # as (1, 4), nearer than (2, 1)


def test_no_measured_rate_is_above_the_datasheet_s_peak() -> None:
    for name in cluster_names():
        cluster = load_cluster(name)
        for precision, rate in (cluster.device.matmul or {}).items():
            if rate.table.value is not None:
                table, peak = matmul_table(rate.table.value), cluster.device.peak_flops_per_s[precision].value
                assert (table.work / table.seconds).max() < (peak or 0.0), name


def test_bytes_of_collectives_are_of_the_payload_as_bandwidths_show() -> None:
    """An all-gather of 8 H200 sends 7/8 of its bytes, at half to all of NVLink's 450 GB/s."""
    table = collective_tables("h200_sxm-collectives")["all_gather"]
    seconds = float(1 / table.rates(np.array([[8.0, 2.0**29]]))[0])
    assert 225e9 < 7 / 8 * 2**29 / seconds < 450e9


def test_square_matmuls_and_one_line_of_attention_are_found_for_figures() -> None:
    squares = square_matmuls("h200_sxm-matmul")
    assert list(squares) == [2048, 4096, 8192, 16384]
    assert 0.6 < squares[8192] / 989.4e12 < 0.9
    line = attention_by_length("h200_sxm-flash_attention_3", 32, 8)
    assert list(line)[0::7] == [2048, 16384]
    assert line[16384] > line[2048]


def test_attention_of_more_groups_reads_more_and_is_not_faster() -> None:
    table = attention_table("h200_sxm-flash_attention_3")
    assert table.rates(np.array([[2048, 32, 32.0]])) < table.rates(np.array([[2048, 32, 1.0]]))


def test_a_cluster_that_names_no_table_of_the_package_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    named = "{value: h200_sxm-colectives, source: mine}"
    file.write_text(f"extends: h200-sxm\nabout: mine\nnode_link: {{table: {named}}}\n")
    with pytest.raises(UserError, match=r"node_link.table: unknown table .*mean 'h200_sxm-collectives'"):
        load_cluster(str(file))


def test_the_committed_errors_are_of_the_packaged_tables_and_within_what_is_promised() -> None:
    with ERRORS.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["table"] for row in rows] == list(table_names())
    kinds = {"matmul": 0.042, "collectives": 0.06}
    for row in rows:
        most = kinds.get(row["table"].rpartition("-")[2], 0.053)
        assert 0 < float(row["median_error"]) <= most, row
