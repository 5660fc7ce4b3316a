"""What a terminal shows of outputs: what has room, what is below, what is named as not shown."""

from __future__ import annotations

import pytest

from spbench.bench.command_line.output import Output, Table, View, wrapped
from tests.terminal import faults, faults_of, screen_of, words_of

NAMES = ("ulysses+ring_attention", "tensor_parallel", "all_gather_kv")
NUMBERS = ("peak GiB", "reserved GiB", "tokens/s", "sent MiB/GPU", "exposed", "imbalance", "by formula")
LINES = [
    {
        "strategy": name,
        "GPUs": 64,
        **{number: f"{10_000 * at + row:.2f}" for at, number in enumerate(NUMBERS)},
        "cluster": "dgx-h100",
        "reason": "61.3 GiB more than the card has for tensors, at the end of the first backward pass"
        if name == "tensor_parallel"
        else None,
    }
    for row, name in enumerate(NAMES)
]
TABLE = Table("Times of steps", LINES, ("strategy", "by formula"), ("reason",))
AT_80 = """\
Times of steps
in each row: GPUs 64, cluster dgx-h100
                        peak  reserved                sent
strategy                 GiB       GiB  tokens/s   MiB/GPU   exposed  by formula
────────────────────────────────────────────────────────────────────────────────
ulysses+ring_attention  0.00  10000.00  20000.00  30000.00  40000.00    60000.00
tensor_parallel         1.00  10001.00  20001.00  30001.00  40001.00    60001.00
    reason: 61.3 GiB more than the card has for tensors, at the end of the first
      backward pass
all_gather_kv           2.00  10002.00  20002.00  30002.00  40002.00    60002.00
not shown: imbalance; --wide shows all
"""


@pytest.mark.parametrize("view", [View(), View(wide=True), View(details=True)], ids=str)
def test_no_word_is_broken_at_any_width(view: View) -> None:
    text = "a sentence that is longer than a screen of so many columns is broken between its words, " * 2
    assert faults_of(Output([TABLE, text], notes=[text]), view=view) == []


def test_the_check_finds_what_it_is_for() -> None:
    """Pieces of words as columns leave them that are folded, a long line, and too many lines."""
    words = words_of(Output([TABLE]))
    assert faults("strategy\nulysses+ring_att\nention", 80, words) == [
        "a broken word: 'ulysses+ring_att'",
        "a broken word: 'ention'",
    ]
    assert faults(screen_of(Output([TABLE]), 120), 80, words)[0].startswith("past the edge: ")
    assert faults("GPUs\n" * 5, 80, words, most_lines=4) == ["5 lines, at most 4 are wanted"]


def test_a_number_stays_with_its_unit() -> None:
    lines = wrapped("an exchange of +1.45 GiB in 0.06 s, of 8 ranks", 20)
    assert lines == ["an exchange of", "+1.45 GiB in 0.06 s,", "of 8 ranks"]


def test_columns_have_room_in_the_order_of_their_importance() -> None:
    """The last of the numbers comes before the others, and a name of several words takes several lines."""
    assert screen_of(Output([TABLE]), 80) == AT_80


def test_wide_shows_the_other_columns_below_each_row() -> None:
    below = screen_of(Output([TABLE]), 80, View(wide=True))
    assert "not shown" not in below
    assert "    imbalance: 50001.00\n    reason: 61.3 GiB" in below


def test_lines_that_a_terminal_counts_instead() -> None:
    folded = {0: "no attention", 2: "no attention"}
    many = Output([Table("Many", [*LINES, *LINES, *LINES], folded=folded, most=3)], details=[TABLE])
    shown = screen_of(many, 120)
    assert shown.count("ulysses+ring_attention") == 1
    assert "2 more: no attention\n4 more rows; --details shows all\n" in shown
    assert shown.endswith("\n\n--details shows: Times of steps\n")
    whole = screen_of(many, 120, View(details=True))
    assert whole.count("ulysses+ring_attention") == 4
    assert "--details" not in whole


def test_a_first_column_without_room_stands_below() -> None:
    """Even where it is all that differs."""
    lines = [{"cell": f"{number}{'/part' * 30}", "fits": "yes"} for number in range(2)]
    assert screen_of(Output([Table("Cells", lines)]), 80).splitlines() == [
        "Cells",
        "in each row: fits yes",
        *("    cell:", f"      0{'/part' * 30}"),
        *("    cell:", f"      1{'/part' * 30}"),
    ]
