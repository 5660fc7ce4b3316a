"""A page of the site: a Markdown document, with parts from the results in its places, and its HTML.

A module of :mod:`tools.report.pages` has a function ``pages(gathered) -> Iterable[Page]``; it is found by
being there. A line ``<!-- NAME -->`` of the document beside it is the place of the part of that name.
Small drawings on it are SVG (:class:`Svg`), whose marks say what they are when they are pointed at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, Self

from spbench.bench.files import csv_text
from spbench.bench.tools.report.report_markdown import html_of, shown
from spbench.bench.units import percent

#: pixels left of the marks for labels of rows, and below them for an axis
LABELS, AXIS = 110, 34
#: the colour of the page's text
INK = "currentColor"

#: left, top, width and height
Box = tuple[float, float, float, float]
Points = Sequence[tuple[float, float]]


class Svg:
    """A drawing of ``width`` x ``height`` pixels, whose marks are added one by one; text has the page's
    colour unless it is given one."""

    def __init__(self, width: float, height: float):
        self._size = f"{width:.0f} {height:.0f}"
        self._width = width
        self._marks: list[str] = []

    def __str__(self) -> str:
        marks = "\n".join(self._marks)
        return f'<svg viewBox="0 0 {self._size}" width="{self._width:.0f}" aria-hidden="true">{marks}</svg>'

    def _add(self, mark: str, title: str) -> Self:
        name = mark.split()[0]
        self._marks.append(f"<{mark}><title>{escape(title)}</title></{name}>" if title else f"<{mark}/>")
        return self

    def rect(self, box: Box, color: str, title: str = "", opacity: float = 1) -> Self:
        """A filled rectangle."""
        left, top, width, height = box
        faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        place = f'x="{left:.2f}" y="{top:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
        return self._add(f'rect {place} fill="{color}"{faint}', title)

    def line(self, points: Points, color: str = INK, title: str = "", dashed: bool = False) -> Self:
        """A line through points."""
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' * dashed
        return self._add(f'polyline points="{text}" fill="none" stroke="{color}"{dashes}', title)

    def dot(self, x: float, y: float, color: str, title: str) -> Self:
        """A filled circle."""
        return self._add(f'circle cx="{x:.2f}" cy="{y:.2f}" r="3" fill="{color}"', title)

    def text(self, x: float, y: float, text: str, anchor: str = "start", color: str = INK) -> Self:
        """A line of text whose foot is at ``y``; ``anchor``: start, middle or end."""
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
        )
        return self


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, with at most ``most`` steps between them."""
    least = (high - low or 1.0) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= least * (1 - 1e-9))
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


_FOLDER = Path(__file__).parent
_PLACE = re.compile(r"^<!-- ([\w-]+) -->\n", re.MULTILINE)
#: lines of a table above which it scrolls in a box of its own
_TALL = 20


class Html(str):
    """A part of a page that is HTML, in which text from results is escaped."""


def folded(summary: str, text: str) -> Html:
    """A text as it is, such as a file, that readers unfold."""
    return Html(
        f'<details><summary>{escape(summary)}</summary><pre tabindex="0">{escape(text)}</pre></details>\n'
    )


@dataclass(frozen=True)
class Figure:
    """A picture of results/reproduction/figures, drawn by plots/.

    Attributes:
        path: on the site.
        content: of the file: an SVG, or a PNG where that is all there is.
        title: what it shows.
    """

    path: str
    content: bytes
    title: str

    def html(self) -> str:
        """The picture, with a link to it."""
        alt = f"Figure: {escape(self.title)}. Its numbers are in the tables of this page."
        picture = f'<img src="{self.path}" loading="lazy" alt="{alt}">'
        return f'<figure class="plot"><a href="{self.path}">{picture}</a></figure>\n'


@dataclass(frozen=True)
class DataTable:
    """Numbers, shown as a table and written as a CSV file that readers can download.

    Attributes:
        name: unique on its page; letters, digits and hyphens.
        caption: what it shows, with units.
        rows: the value of each column; None is shown as a blank. Floats are shown rounded, and written whole.
        columns: in order; empty: those of the first row.
        sortable: whether readers sort and search it; for tables of more than a few lines.
        percent: columns of parts of one that are shown in percent.
        most: lines that the page shows, the first ones; the file has all.
    """

    name: str
    caption: str
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str] = ()
    sortable: bool = False
    percent: Sequence[str] = ()
    most: int | None = None

    @property
    def heads(self) -> list[str]:
        """The columns in order."""
        return list(self.columns or (self.rows[0] if self.rows else ()))

    def html(self, csv: str) -> str:
        """The table with its caption and a link to its file, ``csv``."""
        return self.figure("numbers", self.lines(), csv)

    def lines(self) -> str:
        """The table in a box that scrolls; cells of numbers carry them whole in data-order, by which they are
        sorted."""
        heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in self.heads)
        lines = (
            "".join(self._cell(row[head], head) for head in self.heads) for row in self.rows[: self.most]
        )
        rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return (
            f'<div class="scroll{" tall" * (len(self.rows) > _TALL)}" tabindex="0" role="region" '
            f'aria-labelledby="{self.name}-caption"><table{" class=sortable" * self.sortable}>'
            f"<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
        )

    def _cell(self, value: Any, head: str) -> str:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            # keys of cells may be broken behind a slash
            return f"<td>{escape(shown(value)).replace('/', '/<wbr>')}</td>"
        text = percent(value) if head in self.percent else shown(value)
        return f'<td class="number" data-order="{value}">{text}</td>'

    @property
    def hidden(self) -> str:
        """What a link says to those who do not see which table it belongs to."""
        return f'<span class="hidden"> of {escape(self.caption)}</span>'

    def figure(self, kind: str, content: str, csv: str) -> str:
        """Content below the caption and above a link to the numbers."""
        return (
            f'<figure class="{kind}" id="{self.name}">'
            f'<figcaption id="{self.name}-caption">{escape(self.caption)}</figcaption>\n{content}\n'
            f'<p class="actions"><a href="{csv}" download>CSV{self.hidden}</a></p></figure>\n'
        )


@dataclass(frozen=True)
class Drawing:
    """Drawings beside each other, with what stands in their place for those who cannot see them.

    Attributes:
        alt: what can be seen, in a sentence or two.
        panels: the title (empty of a single one) and the SVG of each.
        table: the numbers behind it; its name and caption are the drawing's.
        legend: the colour of each kind of mark.
        lists: whether the numbers stand below, folded, or are in their CSV file alone.
    """

    alt: str
    panels: Sequence[tuple[str, str]]
    table: DataTable
    legend: Mapping[str, str] = field(default_factory=dict)
    lists: bool = True

    def html(self, csv: str) -> str:
        """The drawing with its legend and its numbers; a single one scrolls where it is wide."""
        square = '<svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill="{}"/></svg>'
        entries = (f"<li>{square.format(color)}{escape(text)}</li>" for text, color in self.legend.items())
        legend = f'<ul class="legend">{"".join(entries)}</ul>' * bool(self.legend)
        panels = (
            f"<div>{f'<p class=note>{escape(title)}</p>' * bool(title)}{svg}</div>"
            for title, svg in self.panels
        )
        drawn = f'<div class="panels" role="img" aria-label="{escape(self.alt)}">{"".join(panels)}</div>'
        if len(self.panels) == 1:
            drawn = f'<div class="scroll" tabindex="0">{drawn}</div>'
        numbers = f"<details><summary>Numbers{self.table.hidden}</summary>{self.table.lines()}</details>"
        return self.table.figure("drawing", f"{legend}{drawn}{numbers * self.lists}", csv)


#: text is Markdown
Part = str | Html | DataTable | Drawing | Figure | None


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: its file's name; all pages are in one folder, so that links between them are names.
        title: of the window, the heading and the navigation.
        document: a file in the folder pages, or Markdown that has a line break.
        parts: what stands in the places of the document; None is left out.
        group: the heading in the navigation that it stands under; empty: at the top level.
        order: in the navigation; pages of a group stand where the first of them is.
        summary: one sentence, shown below the heading.
        short_title: in the navigation; empty: the title.
        files: further files of the site, by path, such as data for scripts.
        scripts: of these and of assets/, what the page runs.
    """

    path: str
    title: str
    document: str
    parts: Mapping[str, Part | Iterable[Part]] = field(default_factory=dict)
    group: str = ""
    order: int = 50
    summary: str = ""
    short_title: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    scripts: Sequence[str] = ()

    def _content(self) -> Iterator[Part]:
        """The paragraphs of the document, with its parts in their places."""
        is_file = "\n" not in self.document
        text = (_FOLDER / "pages" / self.document).read_text(encoding="utf-8") if is_file else self.document
        paragraphs, *places = _PLACE.split(text)
        yield paragraphs
        for name, below in zip(places[::2], places[1::2], strict=True):
            part = self.parts[name]
            if part is None or isinstance(part, (str, DataTable, Drawing, Figure)):
                yield part
            else:
                yield from part
            yield below

    def rendered(self, links: str = "") -> dict[str, str | bytes]:
        """The page, with links to all pages, and the files that come with it, by path.

        Raises:
            ValueError: two tables have one name.
            KeyError: the document has a place without a part.
        """
        files, blocks = dict(self.files), []
        for part in self._content():
            if isinstance(part, (DataTable, Drawing)):
                table = part if isinstance(part, DataTable) else part.table
                csv = f"data/{Path(self.path).stem}-{table.name}.csv"
                if csv in files:
                    raise ValueError(f"{self.path}: two tables are called {table.name!r}")
                files[csv] = csv_text(table.heads, table.rows)
                blocks.append(part.html(csv))
            elif isinstance(part, Figure):
                files[part.path] = part.content
                blocks.append(part.html())
            elif part is not None:
                blocks.append(part if isinstance(part, Html) else html_of(part))
        here = f'<a href="{self.path}"'
        text = Template((_FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
            title=escape(self.title),
            summary=escape(self.summary),
            navigation=links.replace(here, f'{here} aria-current="page"'),
            content="".join(blocks),
            scripts="".join(f'<script src="{path}"></script>\n' for path in self.scripts),
        )
        return {self.path: text, **files}


def navigation(pages: Sequence[Page], documentation: str = "") -> str:
    """Links to all pages in order, under the headings of their groups, and to the documentation."""
    first: dict[str, int] = {}
    for page in pages:
        first[page.group] = min(first.get(page.group, page.order), page.order)
    ordered = sorted(pages, key=lambda p: (first[p.group] if p.group else p.order, p.group, p.order, p.path))
    text = ""
    for heading, some in groupby(ordered, lambda page: page.group):
        links = (f'<li><a href="{p.path}">{escape(p.short_title or p.title)}</a></li>' for p in some)
        text += f"{f'<p>{escape(heading)}</p>' * bool(heading)}<ul>{''.join(links)}</ul>\n"
    return text + f'<ul><li><a href="{documentation}">Documentation</a></li></ul>\n' * bool(documentation)
