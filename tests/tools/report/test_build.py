"""The site as files: whole, linked, with the numbers of its CSV files, and put in place at once."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import altair as alt
import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.report import build as building
from spbench.bench.tools.report import pages as room
from spbench.bench.tools.report.build import MARKER, Site, build, check_place
from spbench.bench.tools.report.charts import spec_of
from spbench.bench.tools.report.gathered import Gathered, gather
from spbench.bench.tools.report.page import DataTable, Page
from spbench.bench.tools.report.published_tables import quantity_text
from spbench.bench.tools.report.rendering import Rendering, environment, script_json, shown
from tests.tools.report.html_pages import read_page

LIMIT_BYTES = 10_000_000


@pytest.fixture(scope="module")
def small(small_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site of one table."""
    return build(gather(small_results, None), tmp_path_factory.mktemp("small") / "report")


def test_every_link_leads_to_a_file_or_a_place(small: Site) -> None:
    pages = {path: read_page(small.folder / path) for path in small.files if path.endswith(".html")}
    assert {"index.html", "paper-rsa.html", "cells.html"} <= pages.keys()
    for page in pages.values():
        for link in page.links:
            path, _, place = link.partition("#")
            if link.startswith(("data:", "https:")):
                continue
            assert not path or (small.folder / path).is_file(), link
            # what has an equals sign is a state of the page, such as a filter
            assert not place or "=" in place or not path or place in pages[path].ids, link
        assert [name for name, count in page.ids.items() if count > 1] == []


def test_numbers_on_pages_are_those_of_the_csv_files(small: Site) -> None:
    compared = 0
    for path in (path for path in small.files if path.endswith(".html")):
        for figure, lines in read_page(small.folder / path).tables.items():
            file = small.folder / "data" / f"{Path(path).stem}-{figure}.csv"
            with file.open(newline="") as stream:
                rows = list(csv.reader(stream))
            assert lines[0] == []  # the head
            for line, row in zip(lines[1:], rows[1:], strict=True):
                assert line == [float(text) for text in row if _is_number(text)]
                compared += len(line)
    assert compared > 100


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_published_numbers_stand_beside_ours(small: Site) -> None:
    """Megatron on 8 GPUs, batch 64: 8477.28 MiB are published."""
    path = next(small.folder.glob("data/paper-rsa-*memory-mb.csv"))
    with path.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert next(iter(lines[0])) == "what"
    assert list(lines[0])[1] == "error"
    assert len({line["what"] for line in lines}) == len(lines)
    assert {line["published"]: line["status ours"] for line in lines if not line["published"]} == {"": "oom"}
    assert "8477.28" in {line["published"] for line in lines}
    for line in lines:
        if line["published"]:
            error = float(line["ours"]) / float(line["published"]) - 1
            assert float(line["error"]) == pytest.approx(error, abs=1e-6)


def test_the_same_results_give_the_same_bytes(small: Site, small_results: Path, tmp_path: Path) -> None:
    again = build(gather(small_results, None), tmp_path / "report")
    assert again.files == small.files
    for path in small.files:
        assert (again.folder / path).read_bytes() == (small.folder / path).read_bytes(), path


def test_a_site_replaces_a_site_and_leaves_nothing_beside_it(
    small_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = gather(small_results, None)
    planted = {"index.html": b"new"}
    monkeypatch.setattr(building, "files", lambda _: planted)
    folder = tmp_path / "report"
    build(gathered, folder)
    (folder / "old.html").write_text("of an earlier report")
    build(gathered, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", MARKER]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_an_earlier_site_stays_if_a_new_one_cannot_be_built(
    small_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = gather(small_results, None)
    monkeypatch.setattr(building, "files", lambda _: {"index.html": b"old"})
    build(gathered, tmp_path / "report")
    # a file in the place of a folder: the second cannot be written
    monkeypatch.setattr(building, "files", lambda _: {"data": b"new", "data/x.csv": b"new"})
    with pytest.raises(UserError, match="cannot write the report"):
        build(gathered, tmp_path / "report")
    assert (tmp_path / "report" / "index.html").read_bytes() == b"old"
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
    (tmp_path / "planted.py").write_text(
        "from spbench.bench.tools.report.page import Page\n"
        "def pages(gathered):\n"
        "    yield Page('planted.html', f'{len(gathered.papers)} papers', 'layout.html')\n"
    )
    monkeypatch.setattr(room, "__path__", [str(tmp_path)])
    importlib.invalidate_caches()
    try:
        (page,) = room.all_pages(gathered)
    finally:
        sys.modules.pop(f"{room.__name__}.planted", None)
    assert isinstance(page, Page)
    assert page.title == f"{len(gathered.papers)} papers"


def test_data_in_scripts_cannot_end_them() -> None:
    assert "</script>" not in script_json({"a": "</script><!--"})
    with pytest.raises(ValueError):
        script_json({"a": float("nan")})


def test_numbers_are_shown_rounded_and_written_whole() -> None:
    assert [shown(v) for v in (None, float("nan"), 0.123456, 12345.678, 1234567, 2.0, True, "a")] == [
        *("", "", "0.12346", "12,345.7", "1,234,567", "2", "True", "a")
    ]
    rendering = Rendering(environment(), Page("a.html", "A", "table.html", {}), [])
    rendering.show(DataTable("t", "", [{"a": 0.1234567891, "b": None, "c": 'x "y", z', "d": "=1+1"}]))
    assert rendering.files == {"data/a-t.csv": 'a,b,c,d\n0.1234567891,,"x ""y"", z",\'=1+1\n'}


@pytest.mark.parametrize(
    ("field", "unit", "text"),
    [
        ("step_time_s", 0.001, "step time (ms)"),
        ("step_time_s", 1.0, "step time (s)"),
        ("peak_memory_bytes", 2**30, "peak memory (GiB)"),
        ("peak_memory_bytes", 1e6, "peak memory (MB)"),
        ("tokens_per_s", 1, "tokens per second"),
        ("tokens_per_s", 1e3, "thousand tokens per second"),
        ("step_time_s", 60, "step time (60 s)"),
        ("answer", 1, "largest that fits"),
    ],
)
def test_a_quantity_has_the_unit_of_its_column(field: str, unit: float, text: str) -> None:
    assert quantity_text(field, unit) == text


def test_layers_of_a_chart_share_its_data() -> None:
    dots = alt.Chart().mark_point().encode(x="a:Q")
    spec = spec_of(alt.layer(dots, alt.Chart().mark_line().encode(x="a:Q")), [{"a": 1}])
    assert spec["data"] == {"values": [{"a": 1}]}
    assert [layer["mark"]["type"] for layer in spec["layer"]] == ["point", "line"]
    assert [layer for layer in spec["layer"] if "data" in layer] == []


@pytest.mark.slow
def test_the_site_of_the_committed_results_is_small(site: Site) -> None:
    print(f"\n{site.bytes / 1e6:.1f} MB")
    assert site.bytes < LIMIT_BYTES
    assert {"paper-rsa.html", "paper-lasp.html", "paper-dsp.html"} <= site.files.keys()
