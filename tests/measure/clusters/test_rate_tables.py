"""Tables of measured times: calls on measured ones, between two and beyond; packaged files and errors."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters import rate_tables
from spbench.bench.measure.clusters.cluster import cluster_names, load_cluster
from spbench.bench.measure.clusters.rate_tables import (
    RateTable,
    collective_tables,
    rate_table,
    rates_along,
    table_names,
)

ERRORS = Path(__file__).parents[3] / "results" / "reproduction" / "interpolation.csv"


def test_a_measured_call_takes_what_it_took() -> None:
    table = rate_table("h200_sxm-matmul")
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
                table, peak = rate_table(rate.table.value), cluster.device.peak_flops_per_s[precision].value
                assert (table.work / table.seconds).max() < (peak or 0.0), name


def test_bytes_of_collectives_are_of_the_payload_as_bandwidths_show() -> None:
    """An all-gather of 8 H200 sends 7/8 of its bytes, at half to all of NVLink's 450 GB/s."""
    table = collective_tables("h200_sxm-collectives")["all_gather"]
    seconds = float(1 / table.rates(np.array([[8.0, 2.0**29]]))[0])
    assert 225e9 < 7 / 8 * 2**29 / seconds < 450e9


def test_square_matmuls_and_one_line_of_attention_are_found_for_figures() -> None:
    squares = rates_along("h200_sxm-matmul", 32, 8)
    assert list(squares) == [2048, 4096, 8192, 16384]
    assert 0.6 < squares[8192] / 989.4e12 < 0.9
    line = rates_along("h200_sxm-flash_attention_3", 32, 8)
    assert list(line)[0::7] == [2048, 16384]
    assert line[16384] > line[2048]


def test_attention_of_more_groups_reads_more_and_is_not_faster() -> None:
    table = rate_table("h200_sxm-flash_attention_3")
    assert table.rates(np.array([[2048, 32, 32.0]])) < table.rates(np.array([[2048, 32, 1.0]]))


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("node_link.table: h200_sxm-colectives", "unknown table .*mean 'h200_sxm-collectives'"),
        ("node_link.table: h200_sxm-matmul", "has matmuls; name a table of collectives, as a100"),
        ("device.matmul.bf16.table: h100_sxm-collectives", "has collectives; name a table of matmuls"),
        ("device.matmul.fp8.table: h200_sxm-matmul", "has matmuls in half precision alone"),
        ("device.matmul.bf16.share: 74", "74 is above 1; is it a percentage.*write 0.74$"),
        ("device.memory_efficiency: 1.4", "1.4 is above 1; give 0.02 to 1$"),
        ("device.overlap_loss: 5", "is above 1"),
        ("device.peak_flops_per_s.bf16: 989", "is it TFLOP/s. Then write 989e12$"),
        (
            "device.peak_flops_per_s: {bf16: 1.0e14, fp16: 1.0e14}",
            "limit_flops_per_s: .* above the card's peak",
        ),
        ("device.memory_bandwidth_bytes_per_s: 3.35", "is it TB/s. Then write 3.35e12$"),
        ("device.memory_total_bytes: 80", "is it GiB. Then write 85899345920$"),
        ("node_link.latency_s: 5", "is it us. Then write 5e-6$"),
        ("network.bandwidth_bytes_per_s: 400.0e9", "is it bit/s. Then write 50e9$"),
        ("host.operator_s: 12.9", "is it us. Then write 12.9e-6$"),
        ("device.operators.add: [[8.0, 25.3]]", "operators.add.0.1: 25.3 s"),
    ],
)
def test_what_cannot_be_is_refused_with_the_slip(part: str, problem: str, tmp_path: Path) -> None:
    keys, file = part.partition(": ")[0].split("."), tmp_path / "mine.yaml"
    given: Any = yaml.safe_load(part.partition(": ")[2])
    sourced = (
        {key: {"value": each, "source": "mine"} for key, each in given.items()}
        if isinstance(given, dict)
        else {}
    )
    content = sourced or {"value": given, "source": "mine"}
    for key in reversed(keys):
        content = {key: content}
    file.write_text(yaml.safe_dump({"extends": "h200-sxm", "about": "mine", **content}))
    with pytest.raises(UserError, match=rf"mine.yaml: {keys[0]}\..*{problem}"):
        load_cluster(str(file))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("", r"csv: there are no calls"),
        ("32,32,32,2\n32,32,32,3\n", r"csv:3: 3 us, but line 2 has 2 for that call"),
        ("32,32,32,-2\n", r"csv:2: give numbers above 0 for m, n, k, us"),
        ("32,32,32,nan\n", r"csv:2: give numbers above"),
        ("32,32,32,fast\n", r"csv:2: give a number for each of m, n, k, us"),
        ("4096,4096,4096,0.1\n", r"csv:2: 1.37e\+18 FLOPs a second cannot be"),
    ],
)
def test_a_damaged_table_is_told_by_line(rows: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_tables, "table_text", lambda name: f"m,n,k,us\n{rows}")
    with pytest.raises(UserError, match=problem):
        rate_tables._calls.__wrapped__("h100_sxm-matmul")


def test_the_committed_errors_are_of_the_packaged_tables_and_within_what_is_promised() -> None:
    with ERRORS.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["table"] for row in rows] == list(table_names())
    kinds = {"matmul": 0.042, "collectives": 0.06}
    for row in rows:
        most = kinds.get(row["table"].rpartition("-")[2], 0.053)
        assert 0 < float(row["median_error"]) <= most, row
