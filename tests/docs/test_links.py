"""Relative links and images of every Markdown page lead to a file, and to a heading or id in it.

docs/learn: each chapter is whole, its notebook has its cells, and its pictures say who holds what.

Notebooks of the documentation print what their committed outputs say, when they are run from the start.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from nbformat import NotebookNode

from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from tests.docs.blocks import PAGES, ROOT

LINKING = sorted([*PAGES, *(ROOT / "results").glob("[!r]*/*.md"), *ROOT.glob("results/reproduction/*.md")])
_ID = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")


@cache
def tokens(page: Path) -> list[Token]:
    """All tokens of a page, those within lines too."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [each for token in parsed for each in (token, *(token.children or ()))]


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        target = token.attrGet("href") if token.type == "link_open" else None
        target = token.attrGet("src") if token.type == "image" else target
        if target is not None:
            yield str(target)


@cache
def anchors(page: Path) -> set[str]:
    """Ids of a page: of its headings as GitHub and the site make them, and those of HTML."""
    found, seen = set[str](), Counter[str]()
    parsed = tokens(page)
    for position, token in enumerate(parsed):
        if token.type == "heading_open":
            children = parsed[position + 1].children or ()
            text = "".join(each.content for each in children if each.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        elif token.type in ("html_block", "html_inline"):
            found.update(_ID.findall(token.content))
    return found


def broken(page: Path) -> Iterator[str]:
    """The relative links of a page that lead nowhere."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    assert list(broken(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# A `b`: c, d\n\n# Twice\n\n# Twice\n\n<a id='mine'></a>\n")
    right = ["other.md", "#here", "other.md#a-b-c-d", "other.md#twice-1", "other.md#mine", "https://a.b/#c"]
    wrong = ["none.md", "#nowhere", "other.md#a-b-c", "other.md#twice-2", "none.png"]
    links = "\n".join(f"[a]({link})" for link in [*right, *wrong[:-1]])
    page.write_text(f"# Here\n\n{links}\n\n| a |\n|---|\n| ![a]({wrong[-1]}) |\n")
    assert list(broken(page)) == wrong


LEARN = ROOT / "docs" / "learn"
METHODS = ("tensor_parallelism", "ring_self_attention", "ring_attention", "ulysses", "lasp", "dsp", "experts")


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(LEARN)
    return import_module("pictures")


def test_the_notebook_has_the_cells_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LEARN)
    assert not import_module("notebook").differs()


@pytest.mark.parametrize("name", METHODS)
def test_a_chapter_has_both_pictures_its_bytes_and_a_fault(name: str, pictures: ModuleType) -> None:
    text, chapter = (LEARN / f"{name}.md").read_text(), pictures.CHAPTERS[name]
    drawn = [f"{each}_held" for each in chapter.held] + [f"{each}_timeline" for each in chapter.traced]
    tokens = [each for token in MarkdownIt().parse(text) for each in token.children or ()]
    shown = [str(token.attrGet("src")) for token in tokens if token.type == "image"]
    assert sorted(shown) == sorted(f"images/{each}.png" for each in drawn)
    for part in ("$ spbench trace ", "$ python bytes.py\n", "$ spbench verify ", "\nexit code 1\n"):
        assert part in text


@pytest.mark.parametrize(("placement", "pairs"), [("contiguous", [3, 7, 11, 15]), ("zigzag", [9, 9, 9, 9])])
def test_panels_of_a_ring_count_the_pairs_under_the_mask(
    placement: str, pairs: list[int], pictures: ModuleType
) -> None:
    by_rank = LockstepRanks().run(
        {"sp": 4}, pictures._listed, partial(pictures.of_ring_attention, placement=placement)
    )
    counted = [[int(held.note.split()[0]) for held in rank if held.note[0].isdigit()] for rank in by_rank]
    assert [sum(each) for each in counted] == pairs


def test_panels_of_ulysses_have_a_head_of_all_positions_during_attention(pictures: ModuleType) -> None:
    by_rank = LockstepRanks().run({"sp": 4}, pictures._listed, pictures.of_ulysses)
    for rank, (before, during, after) in enumerate(by_rank):
        held = [[place for place in row if place] for row in during.text]
        assert held == [[*"01234567"] if head == rank else [] for head in range(4)]
        assert before.text == after.text


def test_panels_of_experts_count_the_rows_that_each_rank_gets(pictures: ModuleType) -> None:
    by_rank = LockstepRanks().run({"sp": 4}, pictures._listed, pictures.of_experts)
    assert [after.note for _, after, _ in by_rank] == ["1 row", "4 rows", "5 rows", "6 rows"]
    for rank, (chosen, after, back) in enumerate(by_rank):
        assert sum(cell != "" for row in chosen.text for cell in row) == 4
        assert [number for number, row in enumerate(after.text) if any(row)] == [rank]
        assert [*filter(None, back.text[0])] == [str(2 * rank), str(2 * rank + 1)]


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def texts(notebook: NotebookNode) -> Iterator[str]:
    """What the cells of a notebook print or show as text; of figures, only that there is one."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.text if output.output_type == "stream" else output.data["text/plain"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kinds = {output.output_type for cell in notebook.cells for output in cell.get("outputs", ())}
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert len(list(texts(notebook))) > 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    committed = list(texts(notebook))
    runner = client.NotebookClient(
        notebook,
        timeout=1500,
        kernel_name="python3",
        coalesce_streams=True,  # a command's output comes in pieces
        resources={"metadata": {"path": str(tmp_path)}},
    )
    runner.execute()
    assert list(texts(notebook)) == committed
