"""The pages that scripts/reference_pages.py writes are current."""

from __future__ import annotations

import runpy

from tests.docs.blocks import ROOT


def test_pages_made_from_code_are_current() -> None:
    """`python scripts/reference_pages.py` writes them."""
    pages = runpy.run_path(str(ROOT / "scripts" / "reference_pages.py"))["pages"]()
    assert [path.name for path, text in pages.items() if path.read_text() != text] == []
