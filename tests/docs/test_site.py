"""The site that MkDocs makes: its references are complete, and reading it loads nothing from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spbench
from spbench.bench.command_line.cli import COMMANDS
from tests.docs.blocks import ROOT
from tests.grid import tabled

#: what a browser fetches by itself: not the targets of links
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"' >]+)"""
    r"""|<link\b(?=[^>]*rel=["']?(?:stylesheet|pre|icon))[^>]*href=["']?((?:https?:)?//[^"' >]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')]+)|@import ["']?((?:https?:)?//[^"' ;]+)"""
)


def fetched(text: str) -> list[str]:
    return ["".join(found) for found in FETCHED.findall(text)]


def test_the_python_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: spbench\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(spbench.__all__)


@tabled(__file__, "what_would_be_fetched_is_found")
def test_what_would_be_fetched_is_found(text: str, found: list[str]) -> None:
    assert fetched(text) == found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of MkDocs, such as of a link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="needs the extra docs",
)


@pytest.mark.slow
def test_reading_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 30
    assert {path.name: found for path in files if (found := fetched(path.read_text()))} == {}


@pytest.mark.slow
def test_the_report_is_a_part_of_the_site_with_links_both_ways(site: Path) -> None:
    assert 'href="report/index.html"' in (site / "index.html").read_text()
    assert 'href="../index.html"' in (site / "report" / "index.html").read_text()


@pytest.mark.slow
def test_the_references_are_complete(site: Path) -> None:
    api, commands = ((site / f"{name}.html").read_text() for name in ("api", "cli"))
    assert [name for name in spbench.__all__ if f'id="spbench.{name}"' not in api] == []
    assert not re.search(":(class|func|mod|attr|meth):<code>", api)
    assert "Sentinel" not in commands, "a default of click itself is shown"
    for name in COMMANDS.names():
        command = COMMANDS.load(name)
        assert f'id="spbench-{name}"' in commands
        options = [option for parameter in command.params for option in parameter.opts if option[:2] == "--"]
        assert [option for option in options if option not in commands] == []


@pytest.mark.slow
def test_pages_show_what_they_link_to(site: Path) -> None:
    chapter = (site / "learn/ring_self_attention.html").read_text()
    assert 'href="../impls/strategies/ring_self_attention.py.html"' in chapter
    shown = (site / "impls/strategies/ring_self_attention.py.html").read_text()
    assert "RingSelfAttention" in shown
    assert (site / "results/reproduction/figures/max_seqlen.png").exists()
