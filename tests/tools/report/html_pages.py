"""What tests read from a page of the site, without a browser."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class ReadPage:
    """What stands on a page.

    Attributes:
        tables: of each figure, by its id: the numbers in the cells of each line, whole.
        labels: of each figure, by its id: the label of its drawing.
    """

    ids: Counter[str] = field(default_factory=Counter)
    links: list[str] = field(default_factory=list)
    tables: dict[str, list[list[float]]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = ReadPage()
        self._figure = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.page.ids[given["id"]] += 1
        self.page.links += [given[name] for name in ("href", "src") if name in given]
        if tag == "figure":
            self._figure = given["id"]
            self.page.tables[self._figure] = []
        elif tag == "tr" and self._figure:
            self.page.tables[self._figure].append([])
        elif tag == "td" and "data-order" in given:
            self.page.tables[self._figure][-1].append(float(given["data-order"]))
        elif given.get("role") == "img":
            self.page.labels[self._figure] = given["aria-label"]


def read_page(path: Path) -> ReadPage:
    """What stands on a page of the site."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.page
