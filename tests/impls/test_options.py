"""Bounds of options, from both sides."""

import pytest

from spbench.impls.models.model import model_preset
from spbench.impls.options import LARGEST, LARGEST_OF, wrong_values


@pytest.mark.parametrize("name", ["experts", "shared_inner", "dense_layers", "mtp_layers"])
def test_zero_switches_off_what_a_preset_has(name: str) -> None:
    model = model_preset("deepseek-v3")
    assert getattr(model, name)
    assert [*wrong_values(model, {name: 0})] == []


@pytest.mark.parametrize(
    ("name", "least", "most"), [("layers", 1, LARGEST_OF["layers"]), ("hidden", 1, LARGEST)]
)
def test_both_ends_are_allowed_and_nothing_beyond(name: str, least: int, most: int) -> None:
    model = model_preset("bert-tiny")
    assert not [*wrong_values(model, {name: least}), *wrong_values(model, {name: most})]
    assert [*wrong_values(model, {name: least - 1})] == [(name, f"must be at least {least}, not {least - 1}")]
    assert [*wrong_values(model, {name: most + 1})] == [(name, f"must be at most {most}, not {most + 1}")]
