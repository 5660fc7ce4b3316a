"""What a module of :mod:`tools.report.pages` makes: pages, with charts and tables on them.

Such a module has a function ``pages(gathered) -> Iterable[Page]``; it is found by being there. Its pages name
a template, which extends layout.html and calls ``show(chart)`` or ``show(table)`` where one is to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: its file's name; all pages are in one folder, so that links between them are names.
        title: of the window, the heading and the navigation.
        template: a file in templates/, rendered with ``page``, ``show`` and ``values``.
        group: the heading in the navigation that it stands under; empty: at the top level.
        order: in the navigation; pages of a group stand where the first of them is.
        summary: one sentence, shown below the heading.
        short_title: in the navigation; empty: the title.
        files: further files of the site, by path, such as data for scripts.
    """

    path: str
    title: str
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    order: int = 50
    summary: str = ""
    short_title: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)


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
    """

    name: str
    caption: str
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str] = ()
    sortable: bool = False
    percent: Sequence[str] = ()

    @property
    def heads(self) -> list[str]:
        """The columns in order."""
        return list(self.columns or (self.rows[0] if self.rows else ()))


@dataclass(frozen=True)
class Figure:
    """A figure of results/reproduction/figures, drawn by plots/, as the page shows it.

    Attributes:
        name: of its file, without the ending.
        path: on the site.
        content: of the file: an SVG, or a PNG where that is all there is.
    """

    name: str
    path: str
    content: bytes


@dataclass(frozen=True)
class Selector:
    """A choice above a chart: a field of its data and of its table's rows.

    The chart has a parameter of the field's name, whose value its data are filtered by
    (:func:`tools.report.charts.selected`). Choices for which there are no data with the earlier choices are
    disabled.

    Attributes:
        options: (value, text) in order; the first is chosen at first.
    """

    field: str
    label: str
    options: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Panel:
    """One of several drawings of a chart.

    Attributes:
        title: what is alike for all that it shows.
        spec: as of a :class:`Chart`.
    """

    title: str
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class LegendEntry:
    """What a mark stands for.

    Attributes:
        shape: filled, hollow, square, line, dashed, or cross.
        color: as in CSS.
    """

    text: str
    shape: str
    color: str = "currentColor"


@dataclass(frozen=True)
class Chart:
    """A chart, with what stands in its place for those who cannot see it.

    Attributes:
        name: unique on its page; letters, digits and hyphens.
        caption: what it shows, with units.
        alt: what can be seen in it, in a sentence or two.
        spec: a Vega-Lite specification (``altair.Chart.to_dict()``) without colours of axes, text and
            background, which follow the reader's light or dark scheme; empty for a chart of several panels.
        table: the numbers behind it.
        selectors: choices above it, which also choose among the rows of the table.
        panels: drawings beside each other, in place of ``spec``.
        legend: above the drawings; empty: they have legends of their own, or need none.
    """

    name: str
    caption: str
    alt: str
    spec: Mapping[str, Any]
    table: DataTable
    selectors: Sequence[Selector] = ()
    panels: Sequence[Panel] = ()
    legend: Sequence[LegendEntry] = ()

    @property
    def drawings(self) -> Sequence[Panel]:
        """The panels, or the one drawing that there is."""
        return self.panels or [Panel("", self.spec)]
