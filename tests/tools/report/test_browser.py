"""The site in a browser: run with ``pytest -m slow tests/tools/report``."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from spbench.bench.tools.report.build import Site
from tests.plugins.additions import with_additions
from tests.tools.report.conftest import DESKTOP, Visit, visit

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}


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
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert found.tab.evaluate(wide) <= 0, path
            ids = "[...document.querySelectorAll('[id]')].map((one) => one.id)"
            twice = f"({ids}).filter((id, at, all) => all.indexOf(id) !== at)"
            assert found.tab.evaluate(twice) == [], path
        assert (found.complaints, found.requests) == ([], [])


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
        assert (other.tab.locator("#matching").inner_text(), rows_of(other)) == (count, rows)
    tab.tab.get_by_role("button", name="Clear all").click()
    tab.tab.wait_for_function(f"document.getElementById('matching').textContent === {everything!r}")
    assert tab.tab.evaluate("location.hash") == ""


def test_what_is_downloaded_is_what_is_shown(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "cells.html", "strategy=lasp&sort=seq_len:desc")
    with tab.tab.expect_download() as filtered:
        tab.tab.get_by_role("button", name="CSV of the cells below").click()
    downloaded = list(csv.DictReader(io.StringIO(Path(filtered.value.path()).read_text())))
    every = {(row["scenario"], row["key"]): row for row in site_rows(site)}
    assert f"{len(downloaded)} of {len(every)} cells" == tab.tab.locator("#matching").inner_text()
    assert len(downloaded) == sum(row["strategy"] == "lasp" for row in every.values())
    for row in downloaded:
        theirs = every[row["scenario"], row["key"]]
        assert {k: as_number(v) for k, v in row.items()} == {k: as_number(v) for k, v in theirs.items()}
    lengths = column_of(tab, "seq len")
    assert lengths == [row["seq_len"] for row in downloaded][: len(lengths)]
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


def test_a_row_opens_its_details_and_columns_sort_by_keyboard(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "cells.html", "scenario=rsa_table4&status=ok")
    button = tab.tab.locator("#cells td.opener button").first
    button.focus()
    tab.tab.keyboard.press("Enter")
    detail = tab.tab.locator(".detail").first
    detail.wait_for()
    text = detail.inner_text()
    for words in ("all_reduce", "backward", "activations", "training.backend", "Settings"):
        assert words in text
    assert button.get_attribute("aria-expanded") == "true"
    tab.tab.keyboard.press("Enter")
    header = tab.tab.get_by_role("columnheader", name="peak memory bytes")
    header.locator("[tabindex='0'], button").first.focus()
    tab.tab.keyboard.press("Enter")
    tab.tab.wait_for_function("decodeURIComponent(location.hash).includes('sort=peak_memory_bytes:asc')")
    peaks = [int(peak) for peak in column_of(tab, "peak memory bytes") if peak]
    assert len({*peaks}) > 3
    assert peaks == sorted(peaks)


def test_a_table_of_errors_sorts_by_the_numbers_behind_its_texts(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "index.html")
    table = tab.tab.locator("#errors table.sortable")
    for order in ("ascending", "descending"):
        table.get_by_role("columnheader", name="error").click()
        table.locator(f"th[aria-sort={order}]").wait_for()  # DataTables sorts after the click has returned
    texts = table.locator("tbody tr td:nth-child(2)").all_inner_texts()
    errors = [float(text.removesuffix("%")) for text in texts]
    assert len(errors) == 25
    assert errors == sorted(errors, reverse=True)


def test_links_of_the_navigation_lead_through_the_site(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "index.html")
    for path in pages_of(site):
        tab.tab.locator(f"#navigation a[href='{path}']").click()
        tab.ready()
        assert tab.tab.url.endswith(path)
        assert tab.tab.locator("#navigation a[aria-current=page]").get_attribute("href") == path


def test_a_phone_has_the_navigation_below_and_the_first_key_skips_to_the_content(
    browser: Browser, site: Site
) -> None:
    with visit(browser, viewport=PHONE) as found:
        found.open(site.folder / "index.html")
        found.tab.get_by_role("link", name="Pages", exact=True).click()
        found.tab.wait_for_function("window.scrollY > 1000")
        assert found.tab.locator("#navigation a[href='cells.html']").is_visible()
        found.tab.reload()
        found.tab.evaluate("window.scrollTo(0, 0)")
        found.tab.locator("body").press("Tab")
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
        for words in ("LASP reproduces in part", "Not run: what changed"):
            element = found.tab.locator("main li", has_text=words).first
            box = element.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= size[1]


def test_print_shows_no_controls(tab: Visit, site: Site) -> None:
    tab.tab.emulate_media(media="print")
    tab.open(site.folder / "index.html")
    assert not tab.tab.locator("#navigation").is_visible()
    assert not tab.tab.locator(".actions").first.is_visible()
    assert tab.tab.locator("h1").is_visible()


def test_a_drawing_of_a_layer_fills_its_column(tab: Visit, site: Site) -> None:
    tab.open(site.folder / "strategy-ring_attention.html")
    drawing = tab.tab.locator("#phases img")
    drawing.scroll_into_view_if_needed()
    tab.tab.wait_for_function("document.querySelector('#phases img').naturalWidth > 0")
    box = drawing.bounding_box()
    assert box is not None
    assert box["width"] > 600


def test_a_strategy_that_comes_by_plug_in_has_a_page(tab: Visit, small_results: Path, tmp_path: Path) -> None:
    installation = with_additions(tmp_path)
    shutil.copytree(small_results, installation.folder / "results")
    done = installation.spbench("report", "--output", "site", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "strategy-gathered_attention.html" in json.loads(done.stdout)["files"]
    tab.open(installation.folder / "site" / "strategy-gathered_attention.html")
    text = tab.tab.locator("main").inner_text()
    assert "Sequence chunks of which every rank gathers the keys and values" in text
    assert "No layer of this strategy is traced" in text
    assert "This strategy is not compared with other strategies" in text
    assert tab.complaints == []
