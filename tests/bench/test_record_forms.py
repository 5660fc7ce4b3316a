"""Records and tables that YAML describes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.units import GIB

FORMS = """
whole:
  name: name
  size: memory.nbytes | gib
  unknown: memory.other | gib
  left out?: memory.other
  kept?: '0'
  blank: ""
  text: '"{} of {}".format(name, owner)'
  inner: {each: item.name, list: [name, 3, null]}
  parts: records("part", parts)
part: {part: at, of: owner}
lines:
  lines: {part: at}
  important: [part]
  most: 1
texts:
  line: >-
    {{ name }} of {{ owner }}{% if parts %}:
    {%- for part in parts %} {{ text("part", part) }}{{ "," if not loop.last }}{% endfor %}{% endif %}
  part: '{% if at %}{{ at }} ({{ owner }}){% endif %}'
"""


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
