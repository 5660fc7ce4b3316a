"""The first page."""

from __future__ import annotations

from collections.abc import Iterator

from spbench.bench.site.gathered import Gathered
from spbench.bench.site.page import Page


def pages(gathered: Gathered) -> Iterator[Page]:
    """index.html."""
    yield Page(
        "index.html",
        "Sequence parallelism, measured",
        "overview.html",
        {"gathered": gathered},
        order=0,
        short_title="Overview",
    )
