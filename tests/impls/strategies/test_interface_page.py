"""docs/add_strategy.md lists hooks, kinds of sites and collectives as the code has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spbench
from spbench.impls.layout import MEETINGS, SITE_KINDS
from spbench.impls.registries import strategies
from spbench.impls.strategies.base import Strategy

PAGE = Path(__file__).parents[3] / "docs" / "add_strategy.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]


def is_hook(name: str, value: Any) -> bool:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return not name.startswith("_") and not getattr(function, "__final__", False)


def hooks() -> set[str]:
    ours = [cls for cls in Strategy.__mro__ if cls.__module__.startswith("spbench.")]
    return {name for cls in ours for name, value in vars(cls).items() if is_hook(name, value)}


def packaged() -> Iterator[type[Strategy]]:
    """The strategies of this project that are no peers, and the classes that they are derived from."""
    classes = {cls for found in strategies().values() if not found.requires for cls in found.__mro__}
    return (
        cls
        for cls in classes
        if issubclass(cls, Strategy) and cls is not Strategy and cls.__module__.startswith("spbench.impls.")
    )


def test_every_hook_is_on_the_page_with_the_classes_that_override_it() -> None:
    listed = {row[0].strip("`"): row[3] for row in ROWS if len(row) == 4 and row[0].startswith("`")}
    listed = {name: classes for name, classes in listed.items() if name not in spbench.collectives.__all__}
    every = {"name", "summary", "source", "communication"}
    expected = {
        name: "every strategy"
        if name in every
        else ", ".join(sorted(c.__name__ for c in packaged() if name in vars(c)))
        for name in hooks()
    }
    assert listed == expected


def test_every_kind_of_site_is_on_the_page() -> None:
    (row,) = (row for row in ROWS if "`linear_attention`" in row[0] and len(row) == 3)
    columns = [set(re.findall(r"`(\w+)`", cell)) for cell in row]
    assert columns[0] == set(MEETINGS)
    assert columns[1] <= hooks()
    assert set.union(*columns) == SITE_KINDS


def test_collectives_lists_what_it_has_for_strategies_alone() -> None:
    listed = {row[0].strip("`") for row in ROWS if len(row) == 4} - hooks()
    assert (
        {"all_gather", "reduce_scatter"}
        < listed - {"hook", "---", "function"}
        <= set(dir(spbench.collectives))
    )
    assert not {"Any", "torch", "dist"} & set(dir(spbench.collectives))


def test_a_misspelt_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a site cannot be 'attenton'; its kind is one of attention"):
        spbench.Site("attenton", 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"Misspelt.meets has 'attenton', where positions cannot meet; known: "
    ):
        type("Misspelt", (Strategy,), {"meets": frozenset({"attenton"})})
