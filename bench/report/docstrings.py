"""Docstrings as HTML: paragraphs, lists, code, and links to arXiv. Everything else of a text is escaped."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")
#: :role:`name` and ``code``
_CODE = re.compile(r"(?::[a-z]+:)?`{1,2}([^`]+)`{1,2}")
_GITHUB = re.compile(r"(?<![\w/])((?:github\.com|docs\.pytorch\.org)/[\w./-]*[\w/])")


def as_html(text: str) -> Markup:
    """The paragraphs of a docstring that :func:`inspect.cleandoc` has cleaned."""
    return Markup("\n").join(_block(block) for block in re.split(r"\n\s*\n", text.strip()) if block.strip())


def in_line(text: str) -> Markup:
    """A line of text with its code marked and its papers linked."""
    html = _CODE.sub(r"<code>\1</code>", str(escape(text)))
    html = _ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', html)
    return Markup(_GITHUB.sub(r'<a href="https://\1">\1</a>', html))  # escaped above


def _block(block: str) -> Markup:
    before, *items = re.split(r"(?:^|\n)\s*- ", block)
    html = Markup()
    if before.strip():
        html += Markup("<p>{}</p>").format(in_line(" ".join(before.split())))
    if items:
        lines = (Markup("<li>{}</li>").format(in_line(" ".join(item.split()))) for item in items)
        html += Markup("<ul>{}</ul>").format(Markup().join(lines))
    return html
