"""Records and tables that YAML describes. Times and rates for people."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.units import GIB, shown_share, shown_time, three_digits
from tests.grid import data

FORMS = data(__file__)["FORMS"]


@pytest.fixture
def forms(tmp_path: Path) -> RecordForms:
    (tmp_path / "forms.yaml").write_text(FORMS)
    return RecordForms(tmp_path / "forms.yaml")


def test_a_record_has_values_of_items_further_values_and_records(forms: RecordForms) -> None:
    item = SimpleNamespace(name="a", memory={"nbytes": 3 * GIB}, parts=[{"at": 1}, {"at": 2}])
    assert forms.record("whole", item, owner="b") == {
        "name": "a",
        "size": "3.00",
        "unknown": None,
        "kept": 0,
        "blank": "",
        "text": "a of b",
        "inner": {"each": "a", "list": ["a", 3, None]},
        "parts": [{"part": 1, "of": "b"}, {"part": 2, "of": "b"}],
    }
    with pytest.raises(AttributeError, match="memory"):
        forms.record("whole", SimpleNamespace(name="a", parts=[]), owner="b")


def test_a_table_has_a_line_for_each_item(forms: RecordForms) -> None:
    table = forms.table("lines", "Parts", [{"at": 1}, {"at": 2}, {}])
    assert table.lines == [{"part": 1}, {"part": 2}, {"part": None}]
    assert (table.title, table.important, table.most) == ("Parts", ["part"], 1)


def test_a_text_has_no_further_blanks_and_may_have_texts_of_other_items(forms: RecordForms) -> None:
    item = {"name": "a", "parts": [{"at": 1}, {"at": 2}]}
    assert forms.text("line", item, owner="b") == "a of b: 1 (b), 2 (b)"
    assert forms.text("line", {"name": "a"}, owner="b") == "a of b"
    assert forms.text("part", {}, owner="b") == ""
    with pytest.raises(AttributeError, match="parts"):
        forms.text("line", SimpleNamespace(name="a"), owner="b")


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
