"""The errors of interpolation: by hand on a small table, and the committed ones of a small file."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import numpy as np
import pytest

from spbench.bench.measure.clusters.rate_tables import RateTable

SCRIPT = runpy.run_path(
    str(Path(__file__).parents[2] / "scripts" / "interpolation_errors.py"), run_name="errors"
)


def test_a_call_off_the_line_of_its_neighbours_is_off_by_so_much() -> None:
    sizes, rates = np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 3.0, 4.0])
    (error,) = SCRIPT["errors_between"](RateTable(sizes, 1 / rates, np.ones(3)), [0])
    # computed at the geometric mean of 1 and 4 a second, it takes 1/2 s for 1/3
    assert error == pytest.approx(0.5)


def test_a_call_twice_as_large_as_the_table_has_is_off_by_its_own_rate() -> None:
    sizes, seconds = np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]), np.array([1.0, 1.6])
    (error,) = SCRIPT["errors_beyond"](RateTable(sizes, seconds, np.array([2.0, 4.0])), 0)
    assert error == pytest.approx(0.25)


def test_the_committed_line_of_a_table_is_what_the_script_computes() -> None:
    with SCRIPT["FILE"].open(encoding="utf-8") as lines:
        committed = {row["table"]: row for row in csv.DictReader(lines)}
    computed = SCRIPT["row"]("l40s-collectives")
    assert {name: str(value) for name, value in computed.items()} == committed["l40s-collectives"]
