"""docs/add_strategy.md lists hooks, kinds of sites and collectives as the code has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import spbench
from spbench.impls.layout import MEETINGS, SITE_KINDS
from spbench.impls.strategies.base import Strategy

PAGE = Path(__file__).parents[3] / "docs" / "add_strategy.md"
ROWS = [
    [set(re.findall(r"`(\w+)`", cell)) for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]


def is_hook(name: str, value: Any) -> bool:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return not name.startswith("_") and not getattr(function, "__final__", False)


def hooks() -> set[str]:
    ours = [cls for cls in Strategy.__mro__ if cls.__module__.startswith("spbench.")]
    return {name for cls in ours for name, value in vars(cls).items() if is_hook(name, value)}


def test_every_hook_is_on_the_page() -> None:
    listed = [row[1] for row in ROWS if len(row) == 3 and not row[0] and not row[2]]
    assert sorted(name for names in listed for name in names) == sorted(hooks())


def test_every_kind_of_site_is_on_the_page() -> None:
    (row,) = (row for row in ROWS if len(row) == 3 and all(row))
    assert row[0] == set(MEETINGS)
    assert row[1] <= hooks()
    assert set.union(*row) == SITE_KINDS


def test_collectives_lists_what_it_has_for_strategies_alone() -> None:
    listed = {name for row in ROWS if len(row) == 4 for name in row[0]}
    assert {"all_gather", "reduce_scatter"} < listed <= set(dir(spbench.collectives))
    assert not {"Any", "torch", "dist"} & set(dir(spbench.collectives))


def test_a_misspelt_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a site cannot be 'attenton'; its kind is one of attention"):
        spbench.Site("attenton", 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"Misspelt.meets has 'attenton', where positions cannot meet; choices: "
    ):
        type("Misspelt", (Strategy,), {"meets": frozenset({"attenton"})})
