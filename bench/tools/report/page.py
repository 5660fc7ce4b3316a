"""A page of the site: a Markdown document with tables and figures of results in it, and its HTML.

Each module of :mod:`tools.report.pages` has a function ``pages(gathered) -> Iterable[Page]``. The document
next to a module is a Jinja template, which is filled in with the page's values. A :class:`DataTable`, a
:class:`Figure` or :class:`Html` among the values is shown at the place where the document names the value.

HTML in the Markdown is shown as text, so that no text of a row can become part of a page's code. In addition
to CommonMark there are tables, ``## Title {#place}`` for an address that links name, and ``**{good}words**``
for words in the colour of a verdict: good, partly, bad or unjudged.
"""

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markupsafe import Markup
from pandas import DataFrame

from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.files import csv_text
from spbench.bench.git import day_of
from spbench.bench.tools.papers.comparison import groups
from spbench.bench.tools.papers.paper_findings import verdict_on
from spbench.bench.units import percent

#: lines of tables
TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))

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
    """Turn ``{#place}`` at the end of headings into an id, and ``{good}`` before bold words into a class."""
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
    """The HTML of a Markdown text."""
    return str(_reader().render(markdown))


def plain(text: Any) -> str:
    """Text from results, made safe for Markdown: signs with a meaning in Markdown are escaped."""
    return _SIGNS.sub(r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """Text from results as Markdown code; "" for an empty text."""
    ticks = "``" if "`" in str(text) else "`"
    return f"{ticks}{str(text).replace('|', chr(92) + '|')}{ticks}" if text else ""


def codes(texts: Iterable[Any]) -> str:
    """Several texts as Markdown code, with commas between them."""
    return ", ".join(map(code, texts))


def link(text: str, target: str) -> str:
    """A Markdown link to a page or an address on a page; ``text`` is escaped, as it may come from results."""
    return f"[{plain(text)}]({target.replace(' ', '%20')})"


def marked(text: Any, word: str) -> str:
    """Bold Markdown text in the colour of ``word``, a verdict: good, partly, bad or unjudged."""
    return f"**{{{word}}}{text}**"


def docstring(text: str) -> str:
    """A docstring as Markdown: names in roles become code, arXiv papers and repositories become links."""
    text = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", _ROLE.sub(r"`\1`", inspect.cleandoc(text)))
    return _GITHUB.sub(r"[\1](https://\1)", text)


def dated(commits: str) -> str:
    """A text that names commits (separated by spaces in ``commits``), each with its day if git knows it."""
    days = {commit: day_of(commit) for commit in commits.split()}
    return ", ".join(f"{commit} ({day})" if day else commit for commit, day in days.items())


#: the units in which names of quantities may end, as people write them
_UNITS = {"gib": "GiB", "gb": "GB", "mb": "MB", "mib": "MiB", "ms": "ms", "s": "s", "bytes": "bytes"}


def quantity_words(name: str) -> str:
    """The name of a quantity in words: "throughput (tokens/s)" for "throughput_tokens_per_s"."""
    if name == "max_seq_len":
        return "longest sequence (tokens)"
    rate = name.endswith("_per_s")
    words, _, unit = name.removesuffix("_per_s").rpartition("_")
    if not words or not (rate or unit in _UNITS):
        return name.replace("_", " ")
    return f"{words.replace('_', ' ')} ({f'{unit}/s' if rate else _UNITS[unit]})"


def shown(value: Any) -> str:
    """A value as text for tables: a number is rounded to five digits, with commas between thousands."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.5g}"


# -- whether published numbers reproduce ------------------------------------------------------------


def most_misses(records: DataFrame) -> tuple[str, str] | None:
    """The name of the scenario with the most numbers that are not met, and how many: "2 of 8"; None if all
    numbers are met."""
    verdicts = {name: verdict_on(some) for name, some in groups(records, "scenario")}
    name = max(verdicts, key=lambda one: verdicts[one].judged - verdicts[one].met, default=None)
    if name is None or verdicts[name].met == verdicts[name].judged:
        return None
    return name, f"{verdicts[name].judged - verdicts[name].met} of {verdicts[name].judged}"


# -- pages ------------------------------------------------------------------------------------------------

_FOLDER = Path(__file__).parent
#: the mark that stands in a filled-in document for a table, figure or HTML
_PART = re.compile("\x02(\\d+)\x03")
#: filters for values in documents; text from results needs ``plain`` or ``code``
_FILTERS = (plain, code, codes, link, marked, dated, shown, docstring, quantity_words)


class Html(str):
    """HTML for a page; text from results in it is already escaped."""


@cache
def _html_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    environment.filters |= {"shown": shown, "in_percent": percent}
    return environment


def from_template(name: str, **values: Any) -> Html:
    """The HTML template ``name`` of this folder, filled in with values, which are escaped."""
    return Html(_html_environment().get_template(name).render(values))


@dataclass(frozen=True)
class Figure:
    """A picture on a page: a file of results/reproduction/figures, or drawn for the page.

    Attributes:
        path: the file's path on the site.
        content: the bytes of the file, an SVG or a PNG.
        title: the caption.
        alt: the text for readers who cannot see the picture; empty: the title.
    """

    path: str
    content: bytes
    title: str
    alt: str = ""


@dataclass(frozen=True)
class DataTable:
    """Numbers, shown as a table and written as a CSV file that readers can download.

    Attributes:
        name: a name that is unique on the page; letters, digits and hyphens.
        caption: what the numbers are, with units.
        rows: the values of each line by column; None is shown as a blank. The page shows floats rounded, the
            file has all digits.
        columns: the shown columns in order; empty: the columns of the first row.
        sortable: whether readers can sort and search the table; for tables of more than a few lines.
        percent: the columns of fractions that are shown in percent.
        most: the number of lines that the page shows; the file has all lines. 0: the page shows no table.
        drawn: a picture of the numbers; the table is folded below it.
    """

    name: str
    caption: str
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str] = ()
    sortable: bool = False
    percent: Sequence[str] = ()
    most: int | None = None
    drawn: Figure | None = None

    @property
    def heads(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self.columns or (self.rows[0] if self.rows else ()))


def folded(summary: str, text: str) -> Html:
    """A block headed ``summary`` that readers unfold to see ``text``, for example of a file, verbatim."""
    block = '<details><summary>{}</summary><pre tabindex="0">{}</pre></details>\n'
    return Html(Markup(block).format(summary, text))


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: the file's name; all pages are in one folder, so that links between pages are names.
        title: the title of the window, of the heading and in the navigation.
        document: the name of a file in the folder pages, or Markdown text with a line break.
        values: the values by their names in the document. Texts are Markdown; None is shown as nothing.
        group: the heading in the navigation under which the page is listed; empty: at the top level.
        order: the position in the navigation; a group stands where its first page would.
        summary: one sentence, shown below the heading.
        short_title: the title in the navigation; empty: ``title``.
        files: the contents of further files of the site, by path, such as data for scripts.
        scripts: the scripts that the page runs, from ``files`` or assets/.
    """

    path: str
    title: str
    document: str
    values: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    order: int = 50
    summary: str = ""
    short_title: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    scripts: Sequence[str] = ()

    def blocks(self) -> Iterator[Html | DataTable | Figure]:
        """The filled-in document in order: HTML of its text, and the tables and figures between."""
        parts: list[Any] = []

        def placed(value: Any) -> Any:
            if isinstance(value, list):
                return "".join(map(placed, value))
            if isinstance(value, (DataTable, Figure, Html)):
                parts.append(value)
                return f"\n\n\x02{len(parts) - 1}\x03\n\n"
            # the mark is removed from texts, so that no text of results can stand for a part
            return value.replace("\x02", "") if isinstance(value, str) else "" if value is None else value

        environment = Environment(
            loader=FileSystemLoader(_FOLDER / "pages"),
            undefined=StrictUndefined,
            finalize=placed,
            comment_start_string="{##",  # because {#place} names the address of a heading
            comment_end_string="##}",
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {each.__name__: each for each in _FILTERS}
        environment.globals["badges"] = TABLES.forms["badges"]
        is_text = "\n" in self.document
        template = (environment.from_string if is_text else environment.get_template)(self.document)
        for at, text in enumerate(_PART.split(template.render(self.values))):
            yield parts[int(text)] if at % 2 else Html(html_of(text))

    def rendered(
        self, navigation: Sequence[tuple[str, Sequence[Self]]] = (), documentation: str = ""
    ) -> dict[str, str | bytes]:
        """The contents of files by path: the page with links to all pages, its tables, figures and files.

        Raises:
            ValueError: two tables have the same name.
            jinja2.UndefinedError: the document names a value that the page does not have.
        """
        files, blocks = dict(self.files), list(self.blocks())
        for block in blocks:
            if isinstance(block, DataTable):
                csv = f"data/{Path(self.path).stem}-{block.name}.csv"
                if csv in files:
                    raise ValueError(f"{self.path}: two tables are called {block.name!r}")
                files[csv] = csv_text(block.heads, block.rows)
            figure = block if isinstance(block, Figure) else getattr(block, "drawn", None)
            if figure is not None:
                files[figure.path] = figure.content
        html = from_template(
            "page.html",
            page=self,
            stem=Path(self.path).stem,
            blocks=[Markup(block) if isinstance(block, Html) else block for block in blocks],
            navigation=navigation,
            documentation=documentation,
        )
        return {self.path: html, **files}


def navigation(pages: Sequence[Page]) -> list[tuple[str, list[Page]]]:
    """All pages in the order of the navigation: for each heading of a group ("": none), its pages."""
    first: dict[str, int] = {}
    for page in pages:
        first[page.group] = min(first.get(page.group, page.order), page.order)
    ordered = sorted(pages, key=lambda p: (first[p.group] if p.group else p.order, p.group, p.order, p.path))
    return [(heading, list(some)) for heading, some in groupby(ordered, lambda page: page.group)]
