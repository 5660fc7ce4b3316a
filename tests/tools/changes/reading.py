"""Exports as the parsers of their formats read them."""

from __future__ import annotations

import junitparser
from markdown_it import MarkdownIt


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of the lines of each table, without the header, as a Markdown parser finds them."""
    found: list[list[list[str]]] = []
    in_body = False
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown):
        if token.type in ("tbody_open", "tbody_close"):
            in_body = token.type == "tbody_open"
            found += [[]] if in_body else []
        elif token.type == "tr_open" and in_body:
            found[-1].append([])
        elif token.type == "inline" and in_body:
            found[-1][-1].append("".join(child.content for child in token.children or ()))
    return found


def cases(document: str) -> dict[str, junitparser.TestCase]:
    """The test cases by name."""
    return {case.name: case for suite in junitparser.JUnitXml.fromstring(document.encode()) for case in suite}
