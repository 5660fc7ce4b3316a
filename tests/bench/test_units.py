"""Times and rates for people."""

import pytest

from spbench.bench.units import shown_share, shown_time, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (2.3149, "2.31"), (44.04, "44.0"), (117_696, "118000"), (999.6, "1000"), (9.996, "10.0")),
        *((0.004123, "0.00412"), (0.9996, "1.00"), (-2.345, "-2.35"), (1e-9, "0.00000000100")),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (2.3149, "2.31 s"),
            (0.04404, "44.0 ms"),
            (0.9996, "1.00 s"),
            (0.9994, "999 ms"),
            (3.1e-6, "3.10 us"),
        ),
        *((0, "0 s"), (5e-9, "0.00500 us"), (7200, "7200 s"), (-3e-17, "0 s")),
    ],
)
def test_a_time_has_the_largest_unit_of_which_it_has_one(seconds: float, text: str) -> None:
    assert shown_time(seconds) == text


def test_a_share_is_in_percent() -> None:
    assert (shown_share(0.354), shown_share(None)) == ("35%", None)
