"""Relative links and images of every Markdown page lead to a file, and to a heading or id in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

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
