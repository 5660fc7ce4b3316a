"""What is said of the errors that predicted memory had."""

from __future__ import annotations

import pytest

from spbench.bench.measure.trust.bands import PEAK, RESERVED, packaged_errors, past_errors

ERRORS = {"ddp": {PEAK: [-0.02, 0.0, 0.001, -0.00005]}, "zero3": {PEAK: [0.1]}}


def test_errors_of_a_backend() -> None:
    found = past_errors("ddp", PEAK, ERRORS)
    assert found is not None
    assert (found.rows, found.under, found.furthest_under, found.worst) == (4, 1, 0.02, 0.02)
    assert found.median == pytest.approx(0.000525)
    assert str(found) == (
        "peak of 4 measured numbers of the backend ddp: median error 0.05%, worst 2.0%, 1 too low by more "
        "than 0.01%, at most by 2.00%"
    )


def test_what_was_not_measured_has_the_errors_of_all() -> None:
    found = past_errors("zero1", PEAK, ERRORS)
    assert found is not None
    assert (found.rows, found.of) == (5, "all backends (none of zero1)")
    assert past_errors("zero1", RESERVED, ERRORS) is None


def test_the_package_has_errors() -> None:
    assert len(packaged_errors()["megatron"][PEAK]) > 100
