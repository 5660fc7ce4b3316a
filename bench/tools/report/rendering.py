"""Pages to HTML: jinja2 templates, and the blocks of charts and tables that they show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from spbench.bench.files import csv_text
from spbench.bench.git import day_of
from spbench.bench.tools.report.page import Chart, DataTable, Figure, Page

TEMPLATES = Path(__file__).with_name("templates")


def environment() -> Environment:
    """The templates of this room; what they print is escaped."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "number": shown,
        "percent": lambda part: f"{part:.1%}",
        "code_spans": code_spans,
        "raw_json": script_json,
        "dated": dated,
    }
    return templates


class Rendering:
    """One page being rendered.

    Attributes:
        files: the CSV files of its charts and tables, by path.
        charts, sortable: whether it shows any chart, any table that is sorted.
    """

    def __init__(self, templates: Environment, page: Page, navigation: Sequence[Any]):
        self._templates = templates
        self._page = page
        self._navigation = navigation
        self._names: set[str] = set()
        self.files: dict[str, str | bytes] = {}
        self.charts = False
        self.sortable = False

    def html(self) -> str:
        """The page's text."""
        template = self._templates.get_template(self._page.template)
        return template.render(
            **self._page.values,
            page=self._page,
            show=self.show,
            show_figure=self.show_figure,
            navigation=self._navigation,
            rendering=self,
        )

    def show_figure(self, figure: Figure, title: str) -> Markup:
        """A figure of plots/, whose file becomes one of the site."""
        self.files[figure.path] = figure.content
        return Markup(self._templates.get_template("blocks/figure.html").render(figure=figure, title=title))

    def show(self, block: Chart | DataTable) -> Markup:
        """A chart or table as HTML; its numbers become a CSV file of the site.

        Raises:
            ValueError: another on this page has its name.
        """
        if block.name in self._names:
            raise ValueError(f"{self._page.path}: two charts or tables are called {block.name!r}")
        self._names.add(block.name)
        table = block.table if isinstance(block, Chart) else block
        path = f"data/{Path(self._page.path).stem}-{block.name}.csv"
        self.files[path] = csv_text(table.heads, table.rows)
        kind = "chart" if isinstance(block, Chart) else "table"
        if isinstance(block, Chart):
            self.charts = True
        else:
            self.sortable |= block.sortable
        template = self._templates.get_template(f"blocks/{kind}.html")
        return Markup(template.render(block=block, table=table, csv=path))


def navigation(pages: Sequence[Page]) -> list[tuple[str, list[Page]]]:
    """(heading, pages) in order; pages at the top level have an empty heading."""
    first: dict[str, int] = {}
    for page in pages:
        first[page.group] = min(first.get(page.group, page.order), page.order)
    ordered = sorted(pages, key=lambda p: (first[p.group] if p.group else p.order, p.group, p.order, p.path))
    return [(heading, list(some)) for heading, some in groupby(ordered, lambda page: page.group)]


def shown(value: Any) -> str:
    """A value as tables show it: numbers rounded to five significant digits, thousands set apart."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.5g}"


def code_spans(text: str) -> Markup:
    """The text with what is between backticks as code, as in Markdown."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def dated(commits: str) -> str:
    """Commits, with spaces between them, each with its day where git knows of it."""
    days = {commit: day_of(commit) for commit in commits.split()}
    return ", ".join(f"{commit} ({day})" if day else commit for commit, day in days.items())


def script_json(value: Mapping[str, Any] | Sequence[Any]) -> Markup:
    """JSON that can stand in a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
