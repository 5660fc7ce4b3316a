"""docs/internals/performance.md holds what was measured."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "performance_tables.py"), run_name="tables")


@pytest.mark.parametrize("marker", ["scale", "trackers", "others"])
def test_the_page_has_what_was_measured(script: dict[str, Any], marker: str) -> None:
    page = (ROOT / "docs" / "internals" / "performance.md").read_text()
    shown = page.partition(f"<!-- {marker} -->\n")[2].partition("<!-- end -->")[0]
    lines = script["TABLES"][marker](script["benchmarks"]())
    assert lines
    assert shown == script["markdown"](lines)


def test_all_tables_are_in_the_page(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "internals" / "performance.md").read_text()
    assert page.count("<!-- end -->") == len(script["TABLES"])
