"""The site in a browser: run with ``pytest -m slow tests/tools/report``."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from spbench.bench.tools.report.build import Site
from tests.tools.report.chromium import DESKTOP, Visit, visit

pytestmark = pytest.mark.slow

#: what stands for data in a drawing
MARKS = ".role-mark:is(.mark-symbol, .mark-rect, .mark-line, .mark-rule) :is(path, line)"
PHONE = {"width": 375, "height": 800}


def pages_of(site: Site) -> list[str]:
    """The pages of a site."""
    return [path for path in site.files if path.endswith(".html")]


def kinds_of(site: Site) -> list[str]:
    """One page of each kind: the first of those whose names begin alike, and all papers, which differ."""
    kinds: dict[str, str] = {}
    for path in pages_of(site):
        kind = path if path.startswith("paper-") else path.split("-")[0]
        kinds.setdefault(kind, path)
    return list(kinds.values())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_quiet_ask_for_files_alone_and_have_no_serious_fault(
    browser: Browser, site: Site, scheme: str
) -> None:
    faults = []
    for path in kinds_of(site):
        with visit(browser, viewport=DESKTOP, color_scheme=scheme) as found:
            found.open(site.folder / path)
            found.tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            faults += [f"{path}: {text}" for text in found.complaints + found.requests]
            results = Axe().run(found.tab, options={"preload": False})  # or else it asks for style sheets
            faults += [
                f"{path}: {v['impact']} {v['id']}: {v['nodes'][0]['html'][:200]} ({len(v['nodes'])})"
                for v in results.response["violations"]
                if v["impact"] in ("serious", "critical")
            ]
    assert faults == []


def test_every_page_opens_quietly_and_fits_a_phone(browser: Browser, site: Site) -> None:
    with visit(browser, viewport=PHONE, color_scheme="light") as found:
        for path in pages_of(site):
            found.open(site.folder / path)
            tab = found.tab
            wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{path} is {wide} px too wide"
            ids = "[...document.querySelectorAll('[id]')].map((one) => one.id)"
            assert tab.evaluate(f"(({ids}).filter((id, at, all) => all.indexOf(id) !== at))") == [], path
        assert found.complaints == []
        assert found.requests == []


def test_every_chart_is_drawn(tab: Visit, site: Site) -> None:
    for path in kinds_of(site):
        tab.open(site.folder / path)
        panels = tab.tab.locator("figure.chart .panel").count()
        assert tab.tab.locator("figure.chart .panel .drawing svg").count() == panels, path
        drawings = tab.tab.locator("figure.chart .drawing svg")
        for at in range(drawings.count()):
            one = drawings.nth(at)
            where = one.locator("xpath=ancestor::figure").get_attribute("id")
            assert one.locator(MARKS).count() > 0, f"{path}#{where} shows no mark"
            text = one.text_content() or ""
            assert "undefined" not in text, f"{path}#{where}"
            assert "NaN" not in text, f"{path}#{where}"


def rows_of(tab: Visit) -> list[str]:
    """The text of the lines that the table of cells shows."""
    return tab.tab.locator("#cells tbody tr").all_inner_texts()


def column_of(tab: Visit, head: str) -> list[str]:
    """What the lines that the table of cells shows have in a column, numbers without commas."""
    heads = [each.strip() for each in tab.tab.locator("#cells thead th").all_inner_texts()]
    return [row.split("\t")[heads.index(head)].replace(",", "") for row in rows_of(tab)]


def test_filters_stand_in_the_address_and_stay(tab: Visit, site: Site, browser: Browser) -> None:
    tab.open(site.folder / "cells.html")
    everything = tab.tab.locator("#matching").inner_text()
    tab.tab.select_option("select[data-column=strategy]", "lasp")
    tab.tab.select_option("select[data-column=status]", "oom")
    tab.tab.get_by_role("searchbox", name="Search").fill("tnl")
    tab.tab.get_by_role("columnheader", name="seq len").click()
    tab.tab.wait_for_function("location.hash.includes('sort=seq_len') && location.hash.includes('q=tnl')")
    count, rows = tab.tab.locator("#matching").inner_text(), rows_of(tab)
    assert count != everything
    assert rows
    assert all("oom" in row and "lasp" in row for row in rows)
    with visit(browser, viewport=DESKTOP) as other:
        other.open(site.folder / "cells.html", tab.tab.evaluate("location.hash").removeprefix("#"))
        assert other.tab.locator("#matching").inner_text() == count
        assert rows_of(other) == rows
    tab.tab.reload()
    tab.ready()
    assert rows_of(tab) == rows
    tab.tab.get_by_role("button", name="Clear all").click()
    tab.tab.wait_for_function(f"document.getElementById('matching').textContent === {everything!r}")
    assert tab.tab.evaluate("location.hash") == ""


def test_what_is_downloaded_is_what_is_shown(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "cells.html", "strategy=lasp&sort=seq_len:desc")
    with tab.tab.expect_download() as filtered:
        tab.tab.get_by_role("button", name="CSV of the cells below").click()
    found = list(csv.DictReader(io.StringIO(Path(filtered.value.path()).read_text())))
    known = {(row["scenario"], row["key"]): row for row in site_rows(site)}
    assert f"{len(found)} of {len(known)} cells" == tab.tab.locator("#matching").inner_text()
    assert {row["strategy"] for row in found} == {"lasp"}
    assert len(found) == sum(row["strategy"] == "lasp" for row in known.values())
    for row in found:
        theirs = known[row["scenario"], row["key"]]
        assert {k: as_number(v) for k, v in row.items()} == {k: as_number(v) for k, v in theirs.items()}
    lengths = column_of(tab, "seq len")
    assert lengths == [row["seq_len"] for row in found][: len(lengths)]
    assert sorted(map(int, filter(None, lengths)), reverse=True) == [int(n) for n in lengths if n]


def site_rows(site: Site) -> list[dict[str, str]]:
    """The rows of cells.csv."""
    with (site.folder / "cells.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def as_number(text: str) -> float | str:
    """The number that a text is, or the text: scripts write 1.0 as 1."""
    try:
        return float(text)
    except ValueError:
        return text


def test_all_cells_can_be_downloaded_by_a_link(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "cells.html")
    with tab.tab.expect_download() as everything:
        tab.tab.get_by_role("link", name="CSV of all").click()
    assert Path(everything.value.path()).read_bytes() == (site.folder / "cells.csv").read_bytes()


def test_a_row_opens_its_details_by_keyboard(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "cells.html", "scenario=rsa_table4&status=ok")
    button = tab.tab.locator("#cells td.opener button").first
    button.focus()
    tab.tab.keyboard.press("Enter")
    detail = tab.tab.locator(".detail").first
    detail.wait_for()
    text = detail.inner_text()
    for words in ("all_reduce", "backward", "activations", "training.backend"):
        assert words in text
    assert button.get_attribute("aria-expanded") == "true"
    tab.tab.select_option("select[data-column=scenario]", "lasp2_scalability")
    tab.tab.locator("#cells td.opener button").first.click()
    (row, *_) = [row for row in site_rows(site) if row["scenario"] == "lasp2_scalability"]
    assert row["model"] in rows_of(tab)[0]
    text = tab.tab.locator(".detail").first.inner_text()
    assert "Provenance" in text
    assert "commit" in text


def test_columns_sort_by_keyboard(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "cells.html", "scenario=rsa_table4&status=ok")
    header = tab.tab.get_by_role("columnheader", name="peak memory bytes")
    header.locator("[tabindex='0'], button").first.focus()
    tab.tab.keyboard.press("Enter")
    tab.tab.wait_for_function("decodeURIComponent(location.hash).includes('sort=peak_memory_bytes:asc')")
    peaks = [int(peak) for peak in column_of(tab, "peak memory bytes") if peak]
    assert len({*peaks}) > 3
    assert peaks == sorted(peaks)


def test_choices_above_a_heat_map_choose_its_numbers(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "index.html")
    figure = tab.tab.locator("#best")
    figure.locator("summary").click()
    metric = figure.locator("select[data-field=metric]")
    before = figure.locator(".drawing svg").inner_html()
    metric.select_option("smallest peak memory")
    tab.tab.wait_for_function("location.hash.includes('best.metric')")
    tab.tab.wait_for_function(
        "(old) => document.querySelector('#best .drawing svg')?.innerHTML !== old", arg=before
    )
    shown = figure.locator("tbody tr:visible")
    assert shown.count() > 0
    assert all("smallest peak memory" in text for text in shown.all_inner_texts())
    model = figure.locator("select[data-field=model]").input_value()
    kept = tab.tab.evaluate("location.hash").removeprefix("#")
    tab.tab.goto("about:blank")
    tab.open(site.folder / "index.html", kept)
    assert metric.input_value() == "smallest peak memory"
    assert figure.locator("select[data-field=model]").input_value() == model


def test_links_of_the_navigation_lead_through_the_site(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "index.html")
    for path in pages_of(site):
        tab.tab.locator(f"#navigation a[href='{path}']").click()
        tab.ready()
        assert tab.tab.url.endswith(path)
        assert tab.tab.locator("#navigation a[aria-current=page]").get_attribute("href") == path
        assert tab.tab.locator("h1").count() == 1


def test_the_menu_of_a_phone_opens_and_the_first_key_skips_it(browser: Browser, site: Site) -> None:
    with visit(browser, viewport=PHONE) as found:
        found.open(site.folder / "index.html")
        assert not found.tab.locator("#navigation").is_visible()
        found.tab.get_by_role("button", name="Pages").click()
        assert found.tab.locator("#navigation a[href='cells.html']").is_visible()
        found.tab.reload()
        found.ready()
        found.tab.keyboard.press("Tab")
        assert found.tab.evaluate("document.activeElement.className") == "skip"
        found.tab.keyboard.press("Enter")
        assert found.tab.evaluate("document.activeElement.id") == "content"


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_two_questions_are_answered_without_scrolling(
    browser: Browser, site: Site, size: tuple[int, int]
) -> None:
    """Does LASP reproduce? What changed?"""
    with visit(browser, viewport=dict(zip(("width", "height"), size, strict=True))) as found:
        found.open(site.folder / "index.html")
        for where, words in (("#verdict-lasp", "LASP reproduces in part"), (".changes li", "Not run")):
            element = found.tab.locator(where).first
            assert words in element.inner_text()
            box = element.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= size[1]


def test_on_a_phone_the_error_is_the_second_column(browser: Browser, site: Site) -> None:
    with visit(browser, viewport={"width": 390, "height": 844}) as found:
        found.open(site.folder / "paper-lasp.html")
        for name in ("verdict", "lasp-speed-lasp-speed-throughput-tokens-per-s"):
            head = found.tab.locator(f"figure#{name} thead th").nth(1)
            assert "error" in head.inner_text()
            box = head.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= 390


def test_print_shows_no_controls(tab: Visit, site: Site) -> None:
    tab.tab.emulate_media(media="print")
    tab.open(site.folder / "index.html")
    assert not tab.tab.locator("#navigation").is_visible()
    assert not tab.tab.locator(".selectors").first.is_visible()
    assert tab.tab.locator("h1").is_visible()
