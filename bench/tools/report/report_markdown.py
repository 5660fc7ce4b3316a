"""Markdown of the site's pages as HTML, and text from results for places in Markdown.

HTML in the Markdown is text, so that nothing in a row or a scenario can become part of a page's code. Beside
CommonMark there are tables, ``## Title {#place}`` for a place that links name, and ``**{good}words**`` for
words in the colour of a verdict: good, partly, bad or unjudged.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from pandas import DataFrame

from spbench.bench.git import day_of
from spbench.bench.tools.papers.comparison import groups
from spbench.bench.tools.papers.paper_findings import Word, verdict_on

_CLASS = re.compile(r"\{(good|partly|bad|unjudged)\}")
_PLACE = re.compile(r"\s*\{#([\w-]+)\}$")
_SIGNS = re.compile(r"([\\`*_\[\]<>|#&])")
_ROLE = re.compile(r"(?::[a-z]+:)?`{1,2}([^`]+)`{1,2}")
_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")
_GITHUB = re.compile(r"(?<![\w/])((?:github\.com|docs\.pytorch\.org)/[\w./-]*[\w/])")


@cache
def _reader() -> MarkdownIt:
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.core.ruler.push("places and classes", _set_attributes)
    reader.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    reader.add_render_rule("table_close", lambda *_: "</table></div>")
    return reader


def _set_attributes(state: StateCore) -> None:
    """Takes ``{#place}`` from the end of headings and ``{good}`` from the begin of bold words."""
    for before, token in pairwise(state.tokens):
        children = token.children or []
        if before.type == "heading_open" and children and (place := _PLACE.search(children[-1].content)):
            before.attrSet("id", place[1])
            children[-1].content = children[-1].content[: place.start()]
        for opening, text in pairwise(children):
            if opening.type == "strong_open" and (word := _CLASS.match(text.content)):
                opening.attrSet("class", word[1])
                text.content = text.content[word.end() :]


def html_of(markdown: str) -> str:
    """Markdown as HTML."""
    return str(_reader().render(markdown))


def plain(text: Any) -> str:
    """Text from results for a place in Markdown: none of its signs mean anything."""
    return _SIGNS.sub(r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """Text from results as code; nothing for an empty one."""
    ticks = "``" if "`" in str(text) else "`"
    return f"{ticks}{str(text).replace('|', chr(92) + '|')}{ticks}" if text else ""


def codes(texts: Iterable[Any]) -> str:
    """Several texts as code, with commas between them."""
    return ", ".join(map(code, texts))


def link(text: str, target: str) -> str:
    """A link to a page, or to a place on one; ``text`` may be of results."""
    return f"[{plain(text)}]({target.replace(' ', '%20')})"


def marked(text: Any, word: str) -> str:
    """Bold text in the colour of a verdict, ``word``."""
    return f"**{{{word}}}{text}**"


def docstring(text: str) -> str:
    """A docstring, or a line of one, as Markdown: its code marked, its papers and repositories linked."""
    text = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", _ROLE.sub(r"`\1`", inspect.cleandoc(text)))
    return _GITHUB.sub(r"[\1](https://\1)", text)


def dated(commits: str) -> str:
    """Commits, with spaces between them, each with its day where git knows of it."""
    days = {commit: day_of(commit) for commit in commits.split()}
    return ", ".join(f"{commit} ({day})" if day else commit for commit, day in days.items())


#: units that end the names of quantities, as people write them
_UNITS = {"gib": "GiB", "gb": "GB", "mb": "MB", "mib": "MiB", "ms": "ms", "s": "s", "bytes": "bytes"}


def quantity_words(name: str) -> str:
    """The name of a quantity for people: "throughput (tokens/s)" of "throughput_tokens_per_s"."""
    if name == "max_seq_len":
        return "longest sequence (tokens)"
    rate = name.endswith("_per_s")
    words, _, unit = name.removesuffix("_per_s").rpartition("_")
    if not words or not (rate or unit in _UNITS):
        return name.replace("_", " ")
    return f"{words.replace('_', ' ')} ({f'{unit}/s' if rate else _UNITS[unit]})"


def shown(value: Any) -> str:
    """A value as tables show it: numbers rounded to five significant digits, thousands set apart."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.5g}"


# -- whether published numbers reproduce ------------------------------------------------------------

#: by word, how a sentence in Markdown says it, in its colour: grey where nothing was judged
BADGES: dict[Word, str] = {
    "yes": "**{good}reproduces**",
    "in part": "**{partly}reproduces in part**",
    "no": "**{bad}does not reproduce**",
    "not run": "**{unjudged}was not run**",
}


def most_misses(records: DataFrame) -> tuple[str, str] | None:
    """The scenario with the most misses and their number, as "2 of 8"; None if all are met."""
    verdicts = {name: verdict_on(some) for name, some in groups(records, "scenario")}
    name = max(verdicts, key=lambda one: verdicts[one].judged - verdicts[one].met, default=None)
    if name is None or verdicts[name].met == verdicts[name].judged:
        return None
    return name, f"{verdicts[name].judged - verdicts[name].met} of {verdicts[name].judged}"
