"""The pages of strategies and of regressions in a browser, and of a strategy that comes by plug-in:
run with ``pytest -m slow tests/tools/report``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spbench.bench.tools.report.build import Site
from tests.plugins.additions import as_plugins
from tests.tools.report.chromium import Visit

pytestmark = pytest.mark.slow


def test_a_layer_can_be_zoomed_and_says_what_its_bars_are(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "strategy-ring_attention.html")
    drawing = tab.tab.locator("#layer-forward .drawing")
    bars = drawing.locator(".mark-rect path")
    before = bars.count()
    assert before > 100
    bars.nth(before // 2).scroll_into_view_if_needed()
    bars.nth(before // 2).hover(force=True)
    tooltip = tab.tab.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert {"operator", "duration (ms)", "bytes"} <= set(tooltip.locator(".key").all_inner_texts())
    axis = "#layer-forward .drawing .role-axis-label"
    labels = tab.tab.locator(axis).first.text_content()
    tab.tab.keyboard.down("Control")
    tab.tab.mouse.wheel(0, -600)
    tab.tab.keyboard.up("Control")
    tab.tab.wait_for_function(
        "([where, old]) => document.querySelector(where).textContent !== old", arg=[axis, labels]
    )


def test_cells_of_a_strategy_are_behind_its_link(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "strategy-lasp.html")
    item = tab.tab.locator("main li", has=tab.tab.locator("a[href*='scenario=gate&strategy=lasp']")).first
    count = item.inner_text().split(": ")[1].split()[0]
    item.locator("a").click()
    tab.ready()
    assert tab.tab.locator("#matching").inner_text().startswith(f"{count} of ")


def test_a_strategy_that_comes_by_plug_in_has_a_page(tab: Visit, small_results: Path, tmp_path: Path) -> None:
    installation = as_plugins(tmp_path)
    shutil.copytree(small_results, installation.folder / "results")
    done = installation.spbench("report", "--output", "site", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "strategy-gathered_attention.html" in json.loads(done.stdout)["files"]
    tab.open(installation.folder / "site" / "strategy-gathered_attention.html")
    page = tab.tab.locator("main")
    assert "Sequence chunks of which every rank gathers the keys and values" in page.inner_text()
    assert "There is no trace of a layer of it" in page.inner_text()
    assert "It was not measured beside the others" in page.inner_text()
    assert tab.complaints == []
