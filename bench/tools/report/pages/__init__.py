"""The pages of the site: each module has a function ``pages(gathered)``, see :mod:`tools.report.page`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import Page


def all_pages(gathered: Gathered) -> Iterator[Page]:
    """The pages of all modules here, in the order of the modules' names."""
    for module in pkgutil.iter_modules(__path__):
        yield from importlib.import_module(f"{__name__}.{module.name}").pages(gathered)
