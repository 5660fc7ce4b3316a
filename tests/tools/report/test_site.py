"""The site as files: whole, linked, with the numbers of its CSV files, and put in place at once."""

import csv
import importlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.report import build as building
from spbench.bench.tools.report import pages as room
from spbench.bench.tools.report import report_command
from spbench.bench.tools.report.build import MARKER, PAGES, Site, build, check_place
from spbench.bench.tools.report.gathered import Gathered, gather
from spbench.bench.tools.report.page import DataTable, Figure, Page, folded, html_of, shown
from spbench.bench.tools.report.pages.cells_page import _column, _pooled, script_json
from tests.tools.commands.conftest import Run, command_line

__all__ = ["command_line"]

LIMIT_BYTES = 10 * 2**20
HOSTILE = "<script>alert('x')</script>|`*a*` [b](javascript:c) \"d\" & <img src=x onerror=e>"


@pytest.fixture(scope="module")
def hostile_results(small_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One table, one cell of which has a hostile reason and strategy."""
    results = tmp_path_factory.mktemp("hostile") / "results"
    shutil.copytree(small_results, results)
    rows = results / "baseline" / "rsa_table4" / "cells.jsonl"
    first, *others = rows.read_text().splitlines()
    spoilt = re.sub(r'"reason": *""', lambda _: '"reason": "</script><script>alert(1)</script>"', first)
    assert spoilt != first
    rows.write_text("\n".join([spoilt, *others]) + "\n")
    return results


@pytest.fixture(scope="module")
def small(hostile_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site of these results."""
    return build(gather(hostile_results, None), tmp_path_factory.mktemp("small") / "report")


@dataclass
class Reader(HTMLParser):
    """What stands on a page: ids, addresses, tags, tables without a box that scrolls, and the numbers of
    each figure's table, whole, line by line."""

    text: str
    ids: Counter[str] = field(default_factory=Counter)
    links: list[str] = field(default_factory=list)
    numbers: dict[str, list[list[float]]] = field(default_factory=dict)
    tags: Counter[str] = field(default_factory=Counter)
    handlers: list[str] = field(default_factory=list)
    loose: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._boxes, self._figure = [False], ""
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.ids.update([given["id"]] if "id" in given else [])
        self.links += [given[name] for name in ("href", "src") if name in given]
        self.handlers += [name for name in given if name.startswith("on")]
        if tag == "div":
            self._boxes.append("scroll" in given.get("class", ""))
        elif tag == "table":
            self.loose += not any(self._boxes) and given.get("id") != "cells"
        elif tag == "figure":
            self._figure = given.get("id", "")
            self.numbers[self._figure] = []
        elif tag == "tr" and self._figure:
            self.numbers[self._figure].append([])
        elif tag == "td" and "data-order" in given:
            self.numbers[self._figure][-1].append(float(given["data-order"]))

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self._boxes.pop()


def pages_of(site: Site) -> Iterator[tuple[str, Reader]]:
    for path in site.files:
        if path.endswith(".html"):
            yield path, Reader((site.folder / path).read_text())


def test_every_link_leads_to_a_file_or_a_place_and_every_table_scrolls(small: Site) -> None:
    pages = dict(pages_of(small))
    assert {
        "index.html",
        "paper-rsa.html",
        "cells.html",
        "regressions.html",
        "strategies.html",
    } <= pages.keys()
    for name, page in pages.items():
        for address in page.links:
            path, _, place = address.partition("#")
            if address.startswith(("data:", "https:")):
                continue
            assert not path or (small.folder / path).is_file(), address
            # what has an equals sign is a state of the page, such as a filter
            assert not place or "=" in place or place in pages[path or name].ids, address
        assert [each for each, count in page.ids.items() if count > 1] == []
        assert page.loose == 0, name
        assert page.tags["h1"] == 1


def test_numbers_on_pages_are_those_of_the_csv_files(small: Site) -> None:
    compared = 0
    for path, page in pages_of(small):
        for figure, lines in page.numbers.items():
            if not lines:  # a picture, or a drawing whose numbers are in the file alone
                continue
            with (small.folder / "data" / f"{Path(path).stem}-{figure}.csv").open(newline="") as stream:
                _, *rows = csv.reader(stream)
            for line, row in zip(lines[1:], rows, strict=True):
                numbers = [float(text) for text in row if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text)]
                assert line == numbers[: len(line)] or set(line) <= set(numbers), figure
                compared += len(line)
    assert compared > 100


def test_published_numbers_stand_beside_ours_and_the_error_is_the_second_column(small: Site) -> None:
    """Megatron on 8 GPUs, batch 64: 8477.28 MiB are published."""
    (path,) = (p for p in small.folder.glob("data/paper-rsa-rsa-table4-*.csv") if "8477.28" in p.read_text())
    with path.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert list(lines[0])[1] == "relative error"
    assert sum(line["published"] == "oom" and line["ours"].startswith("oom") for line in lines) > 0
    for line in lines:
        if line["published"] != "oom":
            error = float(line["ours"]) / float(line["published"]) - 1
            assert float(line["relative error"].rstrip("%").lstrip("'")) == pytest.approx(
                100 * error, abs=0.06
            )


def test_the_same_results_give_the_same_bytes(small: Site, hostile_results: Path, tmp_path: Path) -> None:
    again = build(gather(hostile_results, None), tmp_path / "again")
    assert again.files == small.files
    for path in again.files:
        assert (again.folder / path).read_bytes() == (small.folder / path).read_bytes(), path


def test_hostile_texts_stay_texts(small: Site) -> None:
    document = """{{ text | plain }} and {{ text | code }}, {{ text | link("cells.html") }}

{{ text }}

{{ parts }}
"""
    table = DataTable("t", HOSTILE, [{HOSTILE: HOSTILE}])
    drawing = DataTable("u", HOSTILE, [], drawn=Figure("u.svg", b"", HOSTILE, HOSTILE))
    # a text that is written as the place of a part is none
    values = {"text": f"{HOSTILE}\x029\x03", "parts": [table, drawing, folded(HOSTILE, HOSTILE)]}
    page = Page("a.html", HOSTILE, document, values, HOSTILE)
    read = Reader(str(page.rendered()["a.html"]))
    assert (read.tags["script"], read.tags["img"], read.handlers) == (2, 1, [])
    assert not [address for address in read.links if address.startswith("javascript")]
    assert page.rendered()["data/a-t.csv"].count("<script>") == 2  # as it is
    row = "| a | b |\n| --- | --- |\n| {{ text | plain }} | {{ text | code }} |\n"
    rows = Reader(str(Page("b.html", "", row, {"text": HOSTILE}).rendered()["b.html"]))
    # one code is of the footer, and three links are around the content
    assert (rows.tags["td"], rows.tags["code"], rows.tags["em"], rows.tags["a"]) == (2, 2, 0, 3)
    assert all(page.tags["script"] in (2, 5) and not page.handlers for _, page in pages_of(small))
    for path in ("data/cells.js", "data/cell-details.js"):
        assert "<" not in (small.folder / path).read_text()
    with pytest.raises(ValueError):
        script_json({"a": float("nan")})


def test_markdown_has_places_and_colours() -> None:
    assert html_of("## A `b` {#c-d}") == '<h2 id="c-d">A <code>b</code></h2>\n'
    assert html_of("**{bad}2 red** **x**") == (
        '<p><strong class="bad">2 red</strong> <strong>x</strong></p>\n'
    )


def test_numbers_are_shown_rounded_and_written_whole() -> None:
    assert [shown(v) for v in (None, float("nan"), 0.123456, 12345.678, 1234567, 2.0, True, "a")] == [
        *("", "", "0.12346", "12,345.7", "1,234,567", "2", "True", "a")
    ]
    table = DataTable("t", "", [{"a": 0.1234567891, "b": None, "c": 'x "y", z', "d": "=1+1"}], percent=("a",))
    files = Page("a.html", "A", "{{ t }}\n", {"t": table}).rendered()
    assert files["data/a-t.csv"] == 'a,b,c,d\n0.1234567891,,"x ""y"", z",\'=1+1\n'
    assert '<td class="number" data-order="0.1234567891">12.3%</td><td></td>' in files["a.html"]
    with pytest.raises(ValueError, match="two tables are called 't'"):
        Page("a.html", "A", "{{ t }}\n", {"t": [table, table]}).rendered()


def test_a_site_replaces_a_site_and_stays_if_a_new_one_cannot_be_built(
    gathered: Gathered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "files", lambda *_: {"index.html": b"new"})
    folder = tmp_path / "report"
    build(gathered, folder)
    (folder / "old.html").write_text("of an earlier report")
    build(gathered, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", MARKER]
    # a file in the place of a folder: it cannot be written
    monkeypatch.setattr(building, "files", lambda *_: {"data": b"new", "data/x.csv": b"new"})
    with pytest.raises(UserError, match="cannot write the report"):
        build(gathered, folder)
    assert (folder / "index.html").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="no report"):
        check_place(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        check_place(tmp_path / "thesis.tex")
    check_place(tmp_path / "new")


def test_a_page_is_found_by_being_there(
    gathered: Gathered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_page.py").write_text(
        "from spbench.bench.tools.report.page import Page\n"
        "def pages(gathered):\n"
        "    yield Page('planted.html', f'{len(gathered.papers)} papers', '# A\\n')\n"
    )
    monkeypatch.setattr(room, "__path__", [str(tmp_path)])
    importlib.invalidate_caches()
    try:
        (page,) = PAGES.load("planted")(gathered)
    finally:
        sys.modules.pop(f"{room.__name__}.planted_page", None)
    assert page.title == f"{len(gathered.papers)} papers"


@pytest.mark.slow
def test_the_site_of_the_committed_results_is_small(site: Site) -> None:
    assert site.bytes < LIMIT_BYTES
    assert {"paper-rsa.html", "paper-lasp.html", "paper-dsp.html"} <= site.files.keys()


def test_repeated_values_and_names_of_cells_stand_once() -> None:
    assert _column(["a", "b", "a", "a"]) == {"of": ["a", "b"], "at": [0, 1, 0, 0]}
    assert _column([1, True, 1.5]) == {"values": [1, True, 1.5]}
    table = {"columns": ["phase", "bytes"], "lines": [["forward", 8]]}
    settings = {"recompute": "full", "tile": None}
    pooled = _pooled([{"sent": table, "set": settings}, {"sent": {}, "set": {**settings, "tile": 2}}])
    assert [[pooled["parts"][at] for at in cell] for cell in pooled["cells"]] == [
        [[0, [["forward", 8]]], [1, ["full", None]]],
        [[2, []], [1, ["full", 2]]],
    ]
    assert pooled["heads"][:2] == [
        {"names": ["phase", "bytes"], "table": True},
        {"names": ["recompute", "tile"], "table": False},
    ]


def test_a_missing_library_is_one_line(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_command, "NEEDED", ("itables", "no_such_module"))
    code, out, err = command_line("report", "--output", str(tmp_path / "site"))
    assert (code, out) == (2, "")
    assert err.startswith("spbench: spbench report needs no_such_module: pip install itables markdown-it-py")


def test_it_says_what_it_wrote_and_how_large_it_is(
    command_line: Run, small_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "files", lambda *_: {"index.html": b"0123456789"})
    folder = tmp_path / "site"
    words = ("--results", str(small_results), "--output", str(folder), "--format", "json")
    code, out, _ = command_line("report", *words)
    assert code == 0
    content = json.loads(out)
    assert content["index"] == str(folder / "index.html")
    assert content["files"]["index.html"] == 10
    assert content["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert content["build_seconds"] > 0
